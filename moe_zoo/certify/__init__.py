"""The parity certificate: a recipe's tiny twin, one process against every factor of a layout."""

from moe_zoo.certify.certificate import Certificate, Result
from moe_zoo.certify.run import certify

__all__ = ["Certificate", "Result", "certify"]
