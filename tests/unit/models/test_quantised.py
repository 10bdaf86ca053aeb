"""Weights in fewer bits are read as the numbers that they stand for."""

import json

import pytest
import torch
from safetensors.torch import save_file

from moe_zoo.models.quantised import from_fp8_blocks, from_mxfp4
from moe_zoo.models.weight_files import WeightFiles
from moe_zoo.spec.errors import CheckpointError


def test_every_fp4_code_in_both_halves():
    codes = torch.arange(16, dtype=torch.uint8)
    low, high = from_mxfp4(codes.view(1, 1, 16), torch.tensor([[127]], dtype=torch.uint8)).view(16, 2).unbind(1)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert low.tolist() == [*magnitudes, *(-value for value in magnitudes)]
    assert high.tolist() == [0.0] * 16
    swapped = from_mxfp4((codes << 4).view(1, 1, 16), torch.tensor([[129]], dtype=torch.uint8)).view(16, 2)
    assert torch.equal(swapped[:, 1], 4 * low)  # 2 ** (129 - 127)


def test_mxfp4_equals_what_transformers_unpacks():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 4), generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(from_mxfp4(blocks, scales).transpose(-1, -2), theirs)


def test_fp8_blocks_that_do_not_divide_the_matrix():
    generator = torch.Generator().manual_seed(2)
    stored = torch.randn(5, 7, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    found = from_fp8_blocks(stored, scales, (4, 3))
    for row in range(5):
        for column in range(7):
            assert found[row, column] == stored[row, column].float() * scales[row // 4, column // 3]


@pytest.fixture
def folder(tmp_path):
    tensors = {
        "w": torch.randn(6, 8).to(torch.float8_e4m3fn),
        "w_scale_inv": torch.rand(2, 2),
        "experts_blocks": torch.randint(0, 256, (4, 6, 2, 16), dtype=torch.uint8),
        "experts_scales": torch.randint(120, 130, (4, 6, 2), dtype=torch.uint8),
        "plain": torch.randn(4, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [3, 4]}}))
    return tmp_path


def test_a_folder_reads_all_kinds_and_some_entries_alone(folder):
    files = WeightFiles(folder)
    assert files.read("w").shape == (6, 8) and files.read("w").dtype == torch.float32
    whole = files.read("experts")
    assert whole.shape == (4, 64, 6)
    assert torch.equal(files.read("experts", range(1, 3)), whole[1:3])
    assert torch.equal(files.read("plain", range(2, 4)), files.read("plain")[2:])
    assert files.unused() == []


def test_scales_of_another_block_size_are_refused(folder):
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"w_scale_inv; shape \(2, 2\); .* has \(1, 1\) scales"):
        WeightFiles(folder).read("w")


def test_an_index_that_is_cut_short(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a"')
    with pytest.raises(CheckpointError, match=r"index\.json: it is no JSON with a weight_map"):
        WeightFiles(folder)
