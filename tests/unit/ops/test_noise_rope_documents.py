"""Noise is a function of its coordinates; rotation keeps relative positions; packing respects documents."""

import numpy as np
import torch

from moe_zoo.ops.documents import IGNORED, unpack_rows
from moe_zoo.ops.noise import row_seeds, uniform_noise
from moe_zoo.ops.rope import rotary_angles, rotate


def test_noise_of_a_row_does_not_depend_on_its_neighbours():
    seeds = torch.tensor([5, 17, 99])
    together = uniform_noise(seeds, torch.arange(6), 4, salt=2)
    assert torch.equal(together[1:2], uniform_noise(seeds[1:2], torch.arange(6), 4, salt=2))
    assert not torch.equal(together, uniform_noise(seeds, torch.arange(6), 4, salt=3))


def test_noise_is_uniform():
    values = uniform_noise(torch.arange(16), torch.arange(64), 64, salt=0).flatten()
    assert abs(values.mean() - 0.5) < 5e-3 and abs(values.var() - 1 / 12) < 2e-3
    counts = torch.histc(values, 16, 0, 1) / len(values)
    assert (counts - 1 / 16).abs().max() < 4e-3  # four standard deviations


def test_row_seeds_differ_by_run_step_and_row():
    seen = {int(s) for seed in (0, 1) for step in range(3) for s in row_seeds(seed, step, np.arange(50))}
    assert len(seen) == 300 and max(seen) < 2**31


def test_scores_depend_on_relative_position_alone():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = []
    for shift in (0, 11):
        angles = rotary_angles(torch.tensor([[3 + shift, 5 + shift]]), 8, 100.0)
        both = rotate(torch.cat((q, k), dim=2), angles)
        scores.append(both[0, 0, 0] @ both[0, 0, 1])
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=0)


def test_packed_documents_do_not_see_each_other():
    tokens = torch.tensor([[7, 8, 1, 9, 9, 1, 4]])  # bos is 1
    rows = unpack_rows(tokens, bos_id=1)
    assert rows.positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert rows.targets.tolist() == [[8, IGNORED, 9, 9, IGNORED, 4]]
    assert rows.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_a_row_of_one_document_needs_no_mask():
    assert unpack_rows(torch.tensor([[1, 5, 6, 7]]), bos_id=1).mask is None
