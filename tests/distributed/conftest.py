"""In the fast set the two engines take turns over the cases of a law; ``pytest -m slow`` runs what is left out.

Both engines meet each law with every run of the fast set, as each law has several cases.
"""

import pytest

LAWS = ("test_engine_law.py", "test_pipeline_law.py", "test_layout_law.py", "test_encoder_decoder_law.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases that differ in nothing but the engine: one is fast, the first of them or the last by turns."""
    cases: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if item.path.name in LAWS and callspec and "engine" in callspec.params:
            others = {key: str(value) for key, value in callspec.params.items() if key not in ("engine", "zero_stage")}
            cases.setdefault((item.path.name, item.function.__name__, *sorted(others.items())), []).append(item)
    for turn, group in enumerate(cases.values()):
        engines = sorted({item.callspec.params["engine"] for item in group})
        for item in group:
            if len(engines) > 1 and item.callspec.params["engine"] != engines[turn % len(engines)]:
                item.add_marker(pytest.mark.slow)
