"""The order of rows: a permutation of every epoch, computed anywhere in it at once."""

import numpy as np
import pytest

from data_pipelines.order import RowOrder, derive_key, shuffle

GOLDEN = [6, 9, 1, 8, 5, 46, 41, 42, 40, 44, 45, 47]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1023, 4097])
def test_shuffle_is_a_permutation(size):
    assert sorted(shuffle(np.arange(size), size, derive_key(size))) == list(range(size))


def test_shuffle_of_a_trillion_stays_inside_and_has_no_duplicates():
    out = shuffle(np.arange(10**12 - 50_000, 10**12), 10**12, derive_key("big"))
    assert out.min() >= 0 and out.max() < 10**12 and len(set(out.tolist())) == 50_000


def test_shuffle_mixes_like_chance():
    """16 x 16 cells of (input, output) have 225 degrees of freedom; 4 sigma of chi-square is 225 +- 85."""
    size = 1 << 18
    out = shuffle(np.arange(size), size, derive_key("chi"))
    cells = np.bincount(np.arange(size) * 16 // size * 16 + out * 16 // size, minlength=256)
    chi2 = ((cells - size / 256) ** 2 / (size / 256)).sum()
    assert 140 < chi2 < 310


@pytest.mark.parametrize(("num_rows", "window"), [(1, 1), (7, 10), (10, 10), (100, 10), (103, 10), (1009, 64), (30, 1)])
def test_every_epoch_is_a_permutation(num_rows, window):
    order = RowOrder(seed=3, num_rows=num_rows, rows_per_window=window)
    for epoch in range(3):
        assert sorted(order.rows(epoch * num_rows, num_rows)) == list(range(num_rows))


def test_epochs_and_seeds_differ():
    order, other = RowOrder(0, 500, 50), RowOrder(1, 500, 50)
    first, second = order.rows(0, 500), order.rows(500, 500)
    assert (first == second).mean() < 0.1 and (first == other.rows(0, 500)).mean() < 0.1


def test_any_piece_equals_the_whole_across_epochs():
    order = RowOrder(seed=5, num_rows=103, rows_per_window=10)
    whole = order.rows(0, 400)
    for position, count in [(0, 1), (99, 10), (205, 3), (0, 400), (150, 250)]:
        np.testing.assert_array_equal(order.rows(position, count), whole[position : position + count])


def test_a_window_is_finished_before_the_next_begins():
    rows = RowOrder(seed=1, num_rows=103, rows_per_window=10).rows(0, 103)
    windows = rows // 10
    assert (np.diff(windows) != 0).sum() == 10  # 11 windows, 10 borders


def test_the_short_window_moves_between_epochs():
    order = RowOrder(seed=1, num_rows=103, rows_per_window=10)
    places = {int(np.flatnonzero(order.rows(epoch * 103, 103) >= 100)[0]) for epoch in range(12)}
    assert len(places) > 3


def test_the_order_never_changes_between_versions():
    """Saved positions point into this order: a change of it breaks every run that resumes."""
    assert RowOrder(seed=7, num_rows=103, rows_per_window=10).rows(98, 12).tolist() == GOLDEN
