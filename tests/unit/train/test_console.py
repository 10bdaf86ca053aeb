"""What a person reads: bars, clocks, lines."""

import pytest

from moe_zoo.train.console import TrainingDisplay, clock, sparkline

METRICS = {"train/loss": 2.34567, "train/tokens_per_s": 12345.6, "train/mfu": 0.42}
ROUTED = METRICS | {"moe/load": [[0.0, 2.0]], "moe/max_load": 2.0, "moe/dropped": 0.125}


@pytest.mark.parametrize(
    ("load", "bars"),
    [
        ([[0.0, 0.5, 1.0, 1.5, 2.0]], "▁▃▅▇█"),
        ([[9.0, 1.0]], "█▅"),
        ([[0.0, 2.0], [2.0, 0.0]], "▅▅"),
        ([[1.0] * 16], "▅" * 16),
        ([[1.0] * 31 + [2.0]], "▅" * 15 + "█"),
        ([[1.0] * 17], "▅" * 9),
    ],
    ids=[
        "heights",
        "more than twice",
        "mean over layers",
        "16 experts",
        "32 in pairs, the larger shows",
        "17 in pairs",
    ],
)
def test_a_sparkline_has_a_bar_per_expert_at_most_16(load, bars):
    assert sparkline(load) == bars


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (187, "3:07"), (3599, "59:59"), (3765, "1:02:45"), (36e4, "100:00:00")],
)
def test_a_clock_reads(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(("metrics", "tail"), [(METRICS, ""), (ROUTED, "  load ▁█ max 2.00  dropped 12.5%")])
def test_a_line_every_few_steps_and_at_the_end(capsys, metrics, tail):
    display = TrainingDisplay(num_steps=12, first_step=8, every=5, is_silent=False)
    for step in (9, 10, 11, 12):
        display.step(step, metrics)
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  left ")[0] for line in lines] == [
        f"step {step}/12  loss 2.346  12,346 tok/s  mfu 42%{tail}" for step in (10, 12)
    ]
    assert lines[-1].endswith("left 0:00")


def test_text_with_brackets_is_not_markup_and_other_ranks_are_silent(capsys):
    for is_silent in (False, True):
        display = TrainingDisplay(num_steps=1, first_step=0, every=1, is_silent=is_silent)
        display.say("step 1: '[bold]' -> 'x[0]'")
        display.close()
    assert capsys.readouterr().out == "step 1: '[bold]' -> 'x[0]'\n"
