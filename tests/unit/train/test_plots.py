"""Curves are what metrics.jsonl says."""

import json

from moe_zoo.train.plots import Curve, mean_curve, plot_losses, read_curve, smoothed


def test_a_curve_holds_the_steps_at_which_its_name_was_logged(tmp_path):
    rows = [
        {"step": 1, "train/loss": 3.0},
        {"step": 2, "train/loss": 2.0, "valid/loss": 2.5},
        {"step": 3, "train/loss": 1.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_curve(file, "train/loss") == Curve([1, 2, 3], [3.0, 2.0, 1.0])
    assert read_curve(file, "valid/loss") == Curve([2], [2.5])
    assert read_curve(file, "nothing") == Curve([], [])


def test_the_mean_of_seeds_is_taken_step_by_step():
    assert mean_curve([Curve([1, 2], [1.0, 4.0]), Curve([1, 2], [3.0, 2.0])]) == Curve([1, 2], [2.0, 3.0])


def test_smoothing_begins_at_the_first_value_and_follows_a_step():
    curve = smoothed(Curve([1, 2, 3], [4.0, 4.0, 1.0]), decay=0.5)
    assert curve.steps == [1, 2, 3] and curve.values[:2] == [4.0, 4.0] and curve.values[2] == (1 + 2 + 1) / 1.75


def test_a_plot_is_a_png_in_a_folder_that_need_not_exist(tmp_path):
    curve = Curve([1, 2], [3.0, 2.0])
    made = plot_losses(
        tmp_path / "new" / "p.png", {"one": [curve], "two": [curve, curve]}, {"unigram": 2.5}, "t", {"v": curve}
    )
    assert made.read_bytes().startswith(b"\x89PNG")
