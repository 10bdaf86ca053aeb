"""A checkpoint by hand: what is read across chunks, and what is told of each way to damage it."""

import errno
import json
import re
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

import moe_zoo
from moe_zoo.engines import make_engine
from moe_zoo.parallel.build import build_model
from moe_zoo.parallel.placement import Cut, Placement
from moe_zoo.spec.errors import CheckpointError
from moe_zoo.spec.recipe import Recipe
from moe_zoo.train.checkpoint import Checkpoint, latest_checkpoint, reader, save_checkpoint, writer
from moe_zoo.train.checkpoint.format import FORMAT, MANIFEST, Chunk, data_file, digest, folder_name
from moe_zoo.train.export import export_checkpoint

RUNS = {0: [("a", 0, 3), ("b", 0, 2)], 1: [("a", 3, 4)], 2: [("b", 2, 1), ("a", 7, 3)]}  # rank: (name, start, length)


@pytest.fixture
def recipe(run_values) -> Recipe:
    run_values["parallel"] = {"engine": "fsdp"}
    return Recipe.from_dict(run_values)


def write(folder: Path, recipe: Recipe, runs=RUNS, step: int = 7) -> Path:
    """Three ranks' files; element i of a parameter is i."""
    folder.mkdir(parents=True)
    tables = []
    for rank, pieces in runs.items():
        table, raw = [], b""
        for name, start, length in pieces:
            part = np.arange(start, start + length, dtype=np.float32).tobytes()
            chunk = {"name": name, "key": "weight", "start": start, "length": length, "offset": len(raw)}
            table.append(chunk | {"xxh3": xxhash.xxh3_128_hexdigest(part)})
            raw += part
        (folder / data_file(rank)).write_bytes(raw)
        (folder / data_file(rank)).with_suffix(".json").write_text(json.dumps(table))
        tables.append({"file": data_file(rank), "sha256": digest(table)})
    manifest = {"format": FORMAT, "step": step, "stream": None, "recipe": recipe.to_dict(), "tables": tables}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"sha256": digest(manifest)}))
    return folder


@pytest.fixture
def folder(tmp_path, recipe) -> Path:
    return write(tmp_path / "checkpoints" / folder_name(7), recipe)


def refusal(action) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_run_of_elements_is_found_across_chunk_borders(folder, recipe):
    checkpoint = Checkpoint(folder)
    assert (checkpoint.step, checkpoint.recipe, checkpoint.names("weight")) == (7, recipe, ["a", "b"])
    for start in range(10):
        for length in range(10 - start + 1):
            assert checkpoint.fetch("a", "weight", start, length).tolist() == list(range(start, start + length))


def in_columns(tmp_path, recipe) -> Path:
    """A (6, 4) parameter of which two ranks hold two columns each, in two runs; a third answers for nothing."""
    folder, tables = tmp_path / "columns", []
    folder.mkdir()
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    for rank, pieces in enumerate([[(0, 0, 5), (0, 5, 7)], [(1, 0, 8), (1, 8, 4)], [(1, 12, 0)]]):
        table, raw = [], b""
        for part, start, length in pieces:
            values = whole[:, 2 * part : 2 * part + 2].flatten()[start : start + length].tobytes()
            chunk = Chunk("a", "weight", start, length, len(raw), xxhash.xxh3_128_hexdigest(values))
            table.append(chunk._replace(slice={"shape": [6, 4], "cuts": [[1, 2, part, 1]]})._asdict())
            raw += values
        (folder / data_file(rank)).write_bytes(raw)
        (folder / data_file(rank)).with_suffix(".json").write_text(json.dumps(table))
        tables.append({"file": data_file(rank), "sha256": digest(table)})
    manifest = {"format": FORMAT, "step": 7, "stream": None, "recipe": recipe.to_dict(), "tables": tables}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"sha256": digest(manifest)}))
    return folder


@pytest.mark.parametrize("cuts", [(), (Cut(0, 3, 1),), (Cut(1, 4, 2),), (Cut(0, 2, 1, 3), Cut(1, 2, 0))])
def test_columns_are_read_by_any_other_cut_each_chunk_once(tmp_path, recipe, monkeypatch, cuts):
    monkeypatch.setattr(reader, "BLOCK", 3)
    checkpoint, read = Checkpoint(in_columns(tmp_path, recipe)), []
    monkeypatch.setattr(
        checkpoint, "_bytes", lambda *chunk: read.append(chunk) or Checkpoint._bytes(checkpoint, *chunk)
    )
    placement = Placement("a", (6, 4), "stage", cuts)
    found = checkpoint.fetch_slice(placement, "weight", 1, placement.numel - 1)
    assert torch.equal(found, placement.take(torch.arange(24.0).view(6, 4)).flatten()[1:])
    assert len(read) == len(set(map(str, read)))


@pytest.mark.parametrize(
    ("runs", "name", "missing"),
    [
        ({0: [("a", 0, 3)], 1: [("a", 7, 3)]}, "a", 3),
        ({0: [("a", 2, 8)]}, "a", 0),
        ({0: [("a", 0, 9)]}, "a", 9),
        ({0: [("b", 0, 10)]}, "a", 0),
    ],
    ids=["in the middle", "at the beginning", "at the end", "all of it"],
)
def test_a_hole_is_named_by_its_first_element(tmp_path, recipe, runs, name, missing):
    folder = write(tmp_path / "holes", recipe, runs)
    assert refusal(lambda: Checkpoint(folder).fetch(name, "weight", 0, 10)) == (
        f"checkpoint {folder}: weight of a has no element {missing}; every element must be saved once; use an earlier "
        f"checkpoint"
    )


def test_a_folder_without_a_manifest_was_never_finished(folder):
    (folder / MANIFEST).unlink()
    expected = f"checkpoint {folder}: no {MANIFEST}; it was never finished; delete the folder"
    assert refusal(lambda: Checkpoint(folder)) == expected


def test_a_torn_manifest_or_table_is_named(folder):
    for name in (MANIFEST, "rank-00001.json"):
        whole = (folder / name).read_text()
        (folder / name).write_text(whole[: len(whole) // 2])
        assert refusal(lambda: Checkpoint(folder)).startswith(f"checkpoint {folder}: {name}: ")
        (folder / name).write_text(whole)
    Checkpoint(folder).verify()


def test_any_flipped_byte_of_the_manifest_is_noticed(folder):
    raw = (folder / MANIFEST).read_bytes()
    before = json.loads(raw)
    for place in range(len(raw)):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << place % 8
        (folder / MANIFEST).write_bytes(flipped)
        try:
            Checkpoint(folder)
        except CheckpointError as error:
            assert re.search(rf"{MANIFEST}(:| is damaged or of another format; delete)", str(error))
        else:
            assert json.loads(flipped) == before, "another way to write the same"


def test_another_format_is_refused(folder):
    manifest = json.loads((folder / MANIFEST).read_text()) | {"format": FORMAT + 1}
    del manifest["sha256"]
    (folder / MANIFEST).write_text(json.dumps(manifest | {"sha256": digest(manifest)}))
    assert "of another format" in refusal(lambda: Checkpoint(folder))


def test_an_altered_table_is_named(folder):
    path = folder / "rank-00002.json"
    table = json.loads(path.read_text())
    table[1]["start"] = 8
    path.write_text(json.dumps(table))
    expected = f"checkpoint {folder}: the table of rank-00002.bin is damaged; delete the folder"
    assert refusal(lambda: Checkpoint(folder)) == expected


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
def test_damaged_data_is_named_by_file_byte_and_parameter_and_the_rest_still_reads(folder, damage):
    data = folder / "rank-00002.bin"
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 128
    data.write_bytes(raw if damage == "flipped" else raw[:-1])
    if damage == "missing":
        data.unlink()
    checkpoint = Checkpoint(folder)
    assert checkpoint.fetch("a", "weight", 0, 7).tolist() == list(range(7))
    assert refusal(lambda: checkpoint.fetch("a", "weight", 6, 2)) == (
        f"checkpoint {folder}: rank-00002.bin is damaged at byte 4 (weight of a); its hash is not the one written; "
        f"delete that folder to resume from the one before"
    )
    assert "rank-00002.bin is damaged" in refusal(checkpoint.verify)


def test_the_newest_whole_one_counts_and_unfinished_ones_are_none(tmp_path, recipe):
    root = tmp_path / "checkpoints"
    assert latest_checkpoint(root) is None
    (root / "step-12x").mkdir(parents=True)
    (root / folder_name(3)).mkdir()
    skipped = []
    assert latest_checkpoint(root, skipped.append) is None and len(skipped) == 1
    for step in (99_999_999, 100_000_000):
        write(root / folder_name(step), recipe, step=step)
    assert latest_checkpoint(root).step == 100_000_000
    shutil.rmtree(root / folder_name(99_999_999))
    (root / folder_name(100_000_000) / "rank-00000.bin").unlink()
    assert refusal(lambda: latest_checkpoint(root)).startswith(f"checkpoint {root}: none of 2 checkpoints is whole; ")


def test_another_model_is_named_by_the_first_key_in_order(folder, recipe):
    other = recipe.to_dict()["model"] | {"num_layers": 1, "d_model": 16, "vocab_size": 8}
    expected = "model.d_model is 32 there and 16 in the recipe"
    architecture = Recipe.from_dict(recipe.to_dict() | {"model": other}).model
    assert expected in refusal(lambda: Checkpoint(folder).check_model(architecture))


# ---------------------------------------------------------------------- written by an engine


def value_of(name: str, key: str, start: int, length: int) -> torch.Tensor:
    """Weights that tell where they belong."""
    return (torch.arange(start, start + length) + 1000 * len(name) + len(key)) / 1e6


@pytest.fixture
def engine(alone, recipe):
    made = make_engine(build_model(recipe, alone, seed=0), alone, recipe)
    made.load(value_of, num_steps=2)
    return made


def test_what_an_engine_saves_is_all_of_its_state_and_nothing_else_is_left(engine, tmp_path):
    saved = Checkpoint(save_checkpoint(tmp_path, engine, step=2))
    saved.verify()
    for key in ("weight", "exp_avg", "exp_avg_sq"):
        assert sorted(saved.names(key)) == sorted(engine.named)
        for name, param in engine.named.items():
            assert torch.equal(saved.fetch(name, key, 0, param.numel()), value_of(name, key, 0, param.numel()))
    assert saved.names("buffer") == list(engine.buffers())
    assert sorted(path.name for path in saved.folder.iterdir()) == [MANIFEST, "rank-00000.bin", "rank-00000.json"]


def test_a_folder_of_the_step_is_written_anew_and_the_oldest_go(engine, tmp_path):
    (tmp_path / folder_name(2)).mkdir()
    (tmp_path / folder_name(2) / "rank-00009.bin").write_bytes(b"torn")
    first = save_checkpoint(tmp_path, engine, step=2, keep=2)
    assert not (first / "rank-00009.bin").exists()
    save_checkpoint(tmp_path, engine, step=99_999_999, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "step-99999999"}
    save_checkpoint(tmp_path, engine, step=100_000_000, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-100000000"]


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(engine, tmp_path):
    data = save_checkpoint(tmp_path, engine, step=2) / "rank-00000.bin"
    data.write_bytes(data.read_bytes()[:-1])
    Checkpoint(save_checkpoint(tmp_path, engine, step=2)).verify()


def test_a_damaged_later_checkpoint_does_not_crowd_out_the_one_just_saved(engine, tmp_path):
    save_checkpoint(tmp_path, engine, step=2)
    data = save_checkpoint(tmp_path, engine, step=9) / "rank-00000.bin"
    data.write_bytes(data.read_bytes()[:-1])
    save_checkpoint(tmp_path, engine, step=3, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000009"]
    assert latest_checkpoint(tmp_path).step == 3


def test_a_manifest_that_cannot_be_written_is_one_line_and_leaves_no_folder(engine, tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    first = save_checkpoint(tmp_path, engine, step=2)
    table = "rank-00000.json"
    monkeypatch.setattr(writer, "write_durably", lambda path, text: path.name == table or full(path, text))
    assert refusal(lambda: save_checkpoint(tmp_path, engine, step=3)).startswith(
        f"checkpoint {tmp_path}/step-00000003: No space left on device; "
    )
    assert list(tmp_path.iterdir()) == [first]


def test_an_explicit_checkpoint_is_exported_not_the_newest(engine, tmp_path):
    early = save_checkpoint(tmp_path / "run" / "checkpoints", engine, step=2)
    engine.load(lambda *where: value_of(*where) + 1, num_steps=3)
    save_checkpoint(tmp_path / "run" / "checkpoints", engine, step=3)
    for source, shift in ((early, 0), (tmp_path / "run", 1), (tmp_path / "run" / "checkpoints", 1)):
        out = export_checkpoint(source, tmp_path / "exported")
        for name, param in moe_zoo.load(out).model.named_parameters():
            assert torch.equal(param.detach().flatten(), value_of(name, "weight", 0, param.numel()) + shift)
    assert (out / "tokenizer.model").exists()


def test_an_export_of_nothing_or_without_tokenizer_is_refused(engine, tmp_path):
    assert refusal(lambda: export_checkpoint(tmp_path, tmp_path / "out")) == (
        f"export: {tmp_path}; holds no checkpoint; give a run's folder or one of its checkpoints"
    )
    made = save_checkpoint(tmp_path, engine, step=2)
    assert refusal(lambda: export_checkpoint(made, tmp_path / "out", tmp_path / "gone")) == (
        f"export: tokenizer {tmp_path}/gone; no such folder; give it with --tokenizer"
    )


def test_an_export_to_a_full_disk_is_one_line_and_leaves_the_model_that_stood_there(engine, tmp_path):
    made = save_checkpoint(tmp_path / "checkpoints", engine, step=2)
    out = export_checkpoint(made, tmp_path / "exported")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        told = refusal(lambda: export_checkpoint(made, out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert told.startswith(f"export: {out}; ") and "File too large" in told
    assert told.endswith(
        f"; what stood there is unchanged and {made} is whole; free some space or choose another folder, and run moe-zoo "
        f"export"
    )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "exported"]


def test_an_export_to_a_place_that_is_no_folder_is_one_line(engine, tmp_path):
    made = save_checkpoint(tmp_path / "checkpoints", engine, step=2)
    (tmp_path / "file").write_text("mine")
    assert refusal(lambda: export_checkpoint(made, tmp_path / "file")).startswith(
        f"export: {tmp_path}/file; File exists; "
    )
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_whose_numbers_a_family_has_is_exported_as_that_family(engine, tmp_path):
    from transformers import AutoModelForCausalLM

    made = save_checkpoint(tmp_path / "checkpoints", engine, step=2)
    out = export_checkpoint(made, tmp_path / "theirs", family="auto")
    theirs, notes = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert theirs.config.model_type == "dots1" and not notes["missing_keys"] and not notes["unexpected_keys"]
    ours = moe_zoo.load(export_checkpoint(made, tmp_path / "ours"))
    ids = ("bos_token_id", "eos_token_id")
    assert [getattr(theirs.config, name) for name in ids] == [getattr(ours.config, name) for name in ids] == [1, 2]
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)
    assert refusal(lambda: export_checkpoint(made, tmp_path / "no", family="mixtral")) == (
        "export: --format mixtral; the model of this run is no mixtral; give dots1, or auto, which finds it"
    )


def test_an_export_over_a_model_of_more_files_leaves_none_of_them(engine, tmp_path):
    made = save_checkpoint(tmp_path / "checkpoints", engine, step=2)
    out = export_checkpoint(made, tmp_path / "exported")
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "notes.txt"):
        (out / name).write_text("of an earlier model")
    export_checkpoint(made, out)
    assert (out / "notes.txt").exists() and not [*out.glob("model-*"), *out.glob("*.index.json")]
