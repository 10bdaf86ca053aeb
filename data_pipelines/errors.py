"""Errors a user can cause. Each text is one line: ``where: value; rule; remedy``. Our own bugs are asserts instead."""


class DataError(Exception):
    """Bad input to the data pipeline, told in one line."""


class StreamError(DataError):
    """Stored data could not be read, or is not what its index says."""
