"""Preparation: the same bytes however it runs, whatever interrupts it; every token predicted once."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_pipelines import DataError, PrepareSpec, TokenStream, documents, load_tokenizer, open_store, prepare
from data_pipelines.corpus import is_heldout
from data_pipelines.jobs import Workers
from data_pipelines.parts import stored_dtype
from data_pipelines.shards import ShardReader

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def spec(corpus, tokenizer_folder, tmp_path_factory) -> PrepareSpec:
    output = tmp_path_factory.mktemp("prepared") / "set"
    return PrepareSpec(corpus, tokenizer_folder, output, seq_len=65, shard_mib=1, block_kib=64, workers=1)


@pytest.fixture(scope="module")
def prepared(spec):
    return prepare(spec)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same_bytes(one: Path, other: Path) -> bool:
    """All files but the summary, which names its folder."""
    a, b = contents(one), contents(other)
    assert len(a) > 8 and len([name for name in a if name.startswith("train/shard")]) > 1
    return {k: v for k, v in a.items() if k != "prepared.json"} == {k: v for k, v in b.items() if k != "prepared.json"}


def test_every_token_of_every_document_is_predicted_once(spec, prepared):
    """Rows, put back in their order, are the documents: bos, tokens, eos, one after the other."""
    tokenizer = load_tokenizer(spec.tokenizer)
    for split, heldout in (("train", False), ("valid", True)):
        texts = [d.text for d in documents(spec.source) if is_heldout(d.name, 5) == heldout]
        expected = [t for text in texts for t in (tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id)]
        reader = ShardReader(open_store(spec.output), split)
        rows = reader.rows(np.arange(reader.index.num_rows))
        count = (len(expected) - 1) // spec.seq_len
        wanted = np.array([expected[i * 65 : i * 65 + 66] for i in range(count)])
        assert len(rows) == count and sorted(map(tuple, rows)) == sorted(map(tuple, wanted))
        assert (rows != wanted).any() and reader.index.num_tokens == count * 65  # shuffled
        assert reader.index.num_bytes == tokenizer.token_bytes[wanted[:, 1:]].sum()


def test_a_finished_preparation_returns_at_once(spec, prepared):
    before = {p: p.stat().st_mtime_ns for p in spec.output.rglob("*")}
    assert prepare(spec, progress=lambda *_: pytest.fail("worked again")) == prepared
    assert {p: p.stat().st_mtime_ns for p in spec.output.rglob("*") if p.name not in (".work", "lock")} == before


def test_the_set_is_self_contained(spec, prepared):
    inside = load_tokenizer(Path(spec.output) / "tokenizer")
    stream = TokenStream(spec.output, global_batch=4)
    assert (stream.vocab_size, stream.bos_id, stream.eos_id) == (inside.vocab_size, inside.bos_id, inside.eos_id)
    assert (stream.token_bytes == inside.token_bytes).all()
    assert (stream.num_rows, stream.seq_len) == (prepared.train_rows, 65)
    stream.close()


def test_the_number_of_workers_changes_no_byte(spec, prepared, tmp_path):
    seen = []
    prepare(replace(spec, output=tmp_path, workers=2), progress=lambda *step: seen.append(step))
    assert same_bytes(tmp_path, spec.output)
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["tokenize", "write train", "write valid"]
    assert all([d for s, d, _ in seen if s == stage] == list(range(1, seen[0][2] + 1)) for stage in stages[:1])


def test_s3_holds_the_same_bytes(spec, prepared, tmp_path, bucket):
    url = f"{bucket}/prepared/set"
    prepare(replace(spec, output=url, workers=2, work=tmp_path))
    store = open_store(url)
    for name, data in contents(Path(spec.output)).items():
        assert name == "prepared.json" or store.read(name) == data, name
    assert prepare(replace(spec, output=url, work=tmp_path)).train_rows == prepared.train_rows
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("stage", "at"), [("tokenize", 2), ("write train", 1), ("write valid", 1)])
def test_a_failure_on_the_way_leaves_no_index_and_resumes_to_the_same_bytes(spec, prepared, tmp_path, stage, at):
    def stop(now: str, done: int, total: int) -> None:
        if (now, done) == (stage, at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(replace(spec, output=tmp_path), progress=stop)
    assert not (tmp_path / "train" / "index.json").exists() and not (tmp_path / "prepared.json").exists()
    parts = {p: p.stat().st_ino for p in (tmp_path / ".work").glob("*-*.ids")}
    assert len(parts) >= at
    kept = []
    prepare(replace(spec, output=tmp_path), progress=lambda *_: kept.append({p: p.stat().st_ino for p in parts}))
    assert kept[0] == parts  # not tokenized again
    assert same_bytes(tmp_path, spec.output)


def run_script(body: str, spec: PrepareSpec, output: Path) -> subprocess.CompletedProcess:
    script = textwrap.dedent(body) + textwrap.dedent(f"""
        from data_pipelines import DataError, PrepareSpec, prepare
        try:
            prepare(PrepareSpec({str(spec.source)!r}, {str(spec.tokenizer)!r}, {str(output)!r}, 65, shard_mib=1,
                                block_kib=64, workers=1), progress)
        except DataError as error:
            print(error)
    """)
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_killed_preparation_resumes_to_the_same_bytes(spec, prepared, tmp_path):
    kill = """
        import os, signal
        def progress(stage, done, total):
            if (stage, done) == ("tokenize", 3):
                os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_script(kill, spec, tmp_path).returncode == -signal.SIGKILL
    assert len(list((tmp_path / ".work").glob("*-*.ids"))) == 3
    prepare(replace(spec, output=tmp_path))
    assert same_bytes(tmp_path, spec.output)


@pytest.mark.parametrize("limit", [100_000, 900_000])
def test_a_full_disk_is_one_clear_line_and_leaves_no_torn_file(spec, prepared, tmp_path, limit):
    """A file size limit stands for the disk: the kernel refuses the write half way."""
    full = f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        progress = None
    """
    result = run_script(full, spec, tmp_path)
    assert result.stdout.endswith("; what was finished is kept; free space there and run again\n"), result
    assert result.stdout.startswith(f"{tmp_path}/") and result.stdout.count("\n") == 1
    assert not list(tmp_path.rglob("index.json")) and not list(tmp_path.rglob(".*.ids.*"))
    assert not list(tmp_path.rglob(".shard*"))
    prepare(replace(spec, output=tmp_path))
    assert same_bytes(tmp_path, spec.output)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seq_len": 128}, "was prepared with seq_len 65, now 128"),
        ({"seed": 1}, "was prepared with seed 0, now 1"),
        ({"heldout_percent": 10}, "was prepared with heldout_percent 5, now 10"),
    ],
)
def test_another_spec_in_the_same_folder_is_refused(spec, prepared, change, text):
    with pytest.raises(DataError) as error:
        prepare(replace(spec, **change))
    assert str(error.value) == (
        f"prepare.output: {spec.output} {text}; one folder holds one preparation; "
        f"choose another output, or delete this one"
    )


def test_another_tokenizer_or_corpus_is_refused_even_when_the_first_was_interrupted(spec, tokenizer_folder, tmp_path):
    with pytest.raises(ZeroDivisionError):
        prepare(replace(spec, output=tmp_path / "set"), progress=lambda *_: 1 / 0)
    shipped = ROOT / "tokenizers" / "stdlib-2k"
    with pytest.raises(DataError, match=r"was prepared with tokenizer \w{32}, now \w{32}; one folder holds one"):
        prepare(replace(spec, output=tmp_path / "set", tokenizer=shipped))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("another text " * 1000)
    with pytest.raises(DataError, match=r"was prepared with corpus \w{32}, now \w{32}; one folder holds one"):
        prepare(replace(spec, output=tmp_path / "set", source=tmp_path / "texts"))


def test_a_text_that_changed_is_another_corpus(spec, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"part-{number:03d}.txt").write_text(f"text {number:03d} of the router " * 50)
    spec = replace(spec, source=tmp_path / "texts", output=tmp_path / "set")
    prepare(spec)
    changed = tmp_path / "texts" / "part-000.txt"
    changed.write_text(changed.read_text().replace("text 000", "text 999", 1))
    with pytest.raises(DataError, match=r"was prepared with corpus \w{32}, now \w{32}"):
        prepare(spec)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2048, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_ids_are_stored_in_the_smallest_type_that_holds_them(vocab_size, dtype):
    assert stored_dtype(vocab_size) == dtype


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seq_len": 0}, "prepare.seq_len: 0; a whole number from 1 to 1048576; change it"),
        ({"seq_len": "64"}, "prepare.seq_len: '64'; a whole number from 1 to 1048576; change it"),
        ({"heldout_percent": 60}, "prepare.heldout_percent: 60; a whole number from 0 to 50; change it"),
        ({"workers": -1}, "prepare.workers: -1; a whole number from 0 to 4096; change it"),
    ],
)
def test_impossible_numbers_are_refused(spec, tmp_path, change, text):
    with pytest.raises(DataError) as error:
        prepare(replace(spec, output=tmp_path, **change))
    assert str(error.value) == text


def test_an_output_that_cannot_be_written_is_one_clear_line(spec, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError) as error:
        prepare(replace(spec, output=tmp_path / "file"))
    assert str(error.value) == (
        f"{tmp_path}/file/.work: Not a directory; preparation writes there; choose another output or work"
    )


def test_two_preparations_of_one_folder_at_once_do_the_work_once(spec, prepared, tmp_path):
    """The second waits for the first and finds its work done."""
    steps: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(prepare, replace(spec, output=tmp_path), lambda *step: steps.append(step)) for _ in "ab"]
    assert both[0].result() == both[1].result() and len(steps) == len(set(steps))
    assert same_bytes(tmp_path, spec.output)


def test_a_dead_worker_is_one_clear_line(spec, tmp_path):
    with pytest.raises(DataError, match="workers: 2; one ended early, for want of memory or because your script"):
        list(Workers(2).map(os._exit, [(1,)] * 3))


def test_an_empty_split_is_one_clear_line(spec, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one document only " * 100)
    source = tmp_path / "texts"
    with pytest.raises(DataError) as error:
        prepare(replace(spec, source=source, output=tmp_path / "set"))
    assert str(error.value) == (
        f"prepare.source: {source} gives no row of 65 tokens to the valid split; each split needs one; "
        f"add documents (a file is one), lower seq_len or change heldout_percent (0: no valid split)"
    )


def test_without_held_out_documents_there_is_no_valid_split(spec, tmp_path):
    summary = prepare(replace(spec, output=tmp_path, heldout_percent=0, seq_len=64))
    assert summary.valid_rows == 0 and not (tmp_path / "valid").exists()
    assert json.loads((tmp_path / "prepared.json").read_text())["train_rows"] == summary.train_rows
