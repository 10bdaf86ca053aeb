"""Corpora: which documents a source has, in which order, and what is left out."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipelines import DataError, documents
from data_pipelines.corpus import is_heldout


def test_a_folder_is_read_in_sorted_order_without_duplicates_or_binary_files(tmp_path):
    for name, data in [
        ("b.txt", b"two"),
        ("a/z.md", b"one"),
        ("c.txt", b"two"),
        ("d.txt", b"\xff\xfe"),
        ("e.bin", b"no"),
        ("f.txt", b" \n"),
        ("__pycache__/g.txt", b"no"),
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert list(documents(tmp_path)) == [("a/z.md", "one"), ("b.txt", "two")]


def test_jsonl_lines_are_documents_plain_or_gzipped(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ["one", "two", "one"])
    (tmp_path / "x.jsonl").write_text(lines)
    with gzip.open(tmp_path / "y.jsonl.gz", "wt") as file:
        file.write("\n" + lines.replace("two", "three"))
    assert list(documents(tmp_path / "x.jsonl")) == [("x.jsonl:1", "one"), ("x.jsonl:2", "two")]
    assert [d.name for d in documents(tmp_path)] == ["x.jsonl:1", "x.jsonl:2", "y.jsonl.gz:3"]


@pytest.mark.parametrize("line", ['{"txt": "a"}', '{"text": 3}', "[1]", "{", '{"text": "\\ud800"}'])
def test_a_bad_line_is_named(tmp_path, line):
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=r'x.jsonl:2: .*; each line is a JSON object with a "text" string; fix'):
        list(documents(tmp_path / "x.jsonl"))


def test_a_wrong_source_is_one_clear_line(tmp_path):
    with pytest.raises(DataError) as error:
        list(documents("nowhere"))
    assert str(error.value) == (
        "source: 'nowhere'; a source is \"stdlib\", a folder of text files, or a .jsonl or .jsonl.gz file; check the path"
    )
    with pytest.raises(DataError, match=r"holds no text file; known endings: .*\.txt"):
        list(documents(tmp_path))


def test_the_standard_library_is_a_corpus_without_installed_packages():
    names = [document.name for document in documents("stdlib")]
    assert names == sorted(names) and len(names) > 500 and {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name for name in names)


def test_about_the_asked_share_is_held_out_by_name_alone():
    names = [f"file{i}.py" for i in range(10_000)]
    assert not any(is_heldout(name, 0) for name in names)
    for percent in (5, 30, 50):  # 4 sigma of 10,000 draws is under 2 %
        assert abs(sum(is_heldout(name, percent) for name in names) / 100 - percent) < 2


def test_importing_the_package_is_lazy_and_never_brings_torch_or_moe_zoo():
    script = """
import sys, data_pipelines
assert "numpy" not in sys.modules
import data_pipelines.prepare as prepare_function, data_pipelines.prepare
from data_pipelines import *
assert callable(data_pipelines.prepare) and prepare_function is prepare
assert not {"torch", "moe_zoo", "transformers", "obstore"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], check=True, timeout=30)
