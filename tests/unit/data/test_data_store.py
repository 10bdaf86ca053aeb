"""Stores: S3 equals local, faults heal or are named within a bounded time, the cache stays bounded and honest."""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from data_pipelines import DataError, StreamError, TokenStream, open_store, valid_rows
from data_pipelines.retry import Retry
from data_pipelines.shards import ShardReader
from data_pipelines.store import Block

FAST = Retry(attempts=4, total_s=5.0, first_delay_s=0.01, request_s=1.0, connect_s=1.0)


@pytest.fixture
def served(fault_server, write_set):
    """The fault server, with a set of 100 rows behind it."""
    write_set(fault_server.folder, num_rows=100)
    return fault_server


def read_rows(retry: Retry = FAST, **options) -> np.ndarray:
    return ShardReader(open_store("s3://bucket", retry=retry, **options), "train").rows(np.arange(100))


def test_s3_equals_local(tmp_path, bucket, write_set):
    local, remote = write_set(tmp_path / "local"), write_set(f"{bucket}/a/set")
    options = {"global_batch": 24, "micro_batches": 2, "dp": 2, "dp_rank": 1, "seed": 3, "position": 960}
    streams = [TokenStream(local, **options), TokenStream(remote, cache_dir=tmp_path / "cache", **options)]
    for _, here, there in zip(range(50), *streams, strict=False):
        np.testing.assert_array_equal(here.tokens, there.tokens)
        np.testing.assert_array_equal(here.rows, there.rows)
    for stream in streams:
        stream.close()


def test_an_empty_prefix_is_missing_data(bucket):
    with pytest.raises(DataError, match=r"s3://bucket/nothing: no train/index.json; "):
        TokenStream(f"{bucket}/nothing", global_batch=1)


def test_file_urls_are_local_folders(tmp_path, write_set):
    write_set(tmp_path)
    assert len(valid_rows(f"file://{tmp_path}", "train", 9)) == 9


@pytest.mark.parametrize(
    "faults", [["500", "500"], ["503"], ["short"], ["reset"], ["flip"], ["500", "short", "flip"]], ids=" ".join
)
def test_passing_faults_heal(served, faults):
    reader = ShardReader(open_store("s3://bucket", retry=FAST), "train")
    served.requests.clear()
    served.faults[:] = faults
    assert reader.rows(np.arange(7))[:, 0].tolist() == list(range(7))
    assert not served.faults and len(served.requests) == len(faults) + 1


def test_a_server_that_only_fails_is_given_up_in_bounded_time(served):
    served.faults[:] = ["500"] * 1000
    started = time.monotonic()
    with pytest.raises(StreamError, match=r"s3://bucket/train/index.json: .*; gave up after 4 tries in .* s; check"):
        read_rows()
    assert time.monotonic() - started < 3 and len(served.requests) == 4


def test_the_total_time_bounds_the_tries(served):
    served.faults[:] = ["500"] * 1000
    with pytest.raises(StreamError, match="gave up after 3 tries"):
        read_rows(FAST._replace(attempts=9, first_delay_s=0.05, total_s=0.2))


def test_a_server_that_is_not_there_is_named(aws):
    aws(9)  # the discard port: refused
    with pytest.raises(StreamError, match=r"s3://bucket/train/index.json: .*; gave up after"):
        read_rows(FAST._replace(attempts=2))


def test_refused_access_is_not_tried_again(served):
    served.faults[:] = ["403"] * 9
    with pytest.raises(StreamError, match="the store refused access; keys come from AWS_ACCESS_KEY_ID"):
        read_rows()
    assert len(served.requests) == 1


def test_damage_in_the_bucket_is_named(served):
    path = served.folder / "train" / "shard-00001.bin"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    with pytest.raises(StreamError, match=r"s3://bucket/train/shard-00001.bin: block 0 has xxh3_128 \w+, the index"):
        read_rows()


def test_a_cached_block_is_read_once_from_the_server_by_all_readers(served, tmp_path):
    first = read_rows(cache_dir=tmp_path / "cache")
    served.requests.clear()
    np.testing.assert_array_equal(read_rows(cache_dir=tmp_path / "cache"), first)
    assert served.requests == ["train/index.json"]


def test_a_bad_cached_block_is_fetched_again(served, tmp_path):
    first = read_rows(cache_dir=tmp_path / "cache")
    for number, path in enumerate(sorted((tmp_path / "cache").iterdir())):
        path.write_bytes(b"torn" if number % 2 else bytes(len(path.read_bytes())))
    np.testing.assert_array_equal(read_rows(cache_dir=tmp_path / "cache"), first)


def test_the_cache_stays_bounded_and_drops_the_least_recently_used(tmp_path, fault_server):
    limit, size, cache = 4 << 20, 100_000, tmp_path / "cache"
    store, blocks = open_store("s3://bucket", cache_dir=cache, cache_bytes=limit), []
    for number in range(60):
        data = np.full(size, number, dtype=np.uint8).tobytes()
        open_store(fault_server.folder).write(f"{number}", data)
        blocks.append(Block(f"{number}", 0, 0, size, xxh3_128_hexdigest(data)))
    for block in blocks:
        store.read_block(blocks[0])  # used all the time
        store.read_block(block)
        assert sum(p.stat().st_size for p in cache.iterdir()) <= limit
        os.utime(cache / f"{block.digest}.block", ns=(int(block.name),) * 2)  # older than any clock
    kept = {p.stem for p in cache.iterdir()}
    assert fault_server.requests.count("0") == 1
    assert blocks[-1].digest in kept and blocks[1].digest not in kept and len(kept) > 30


def test_a_cache_that_cannot_keep_blocks_still_reads(served, tmp_path, caplog):
    (tmp_path / "cache").mkdir()
    store = open_store("s3://bucket", cache_dir=tmp_path / "cache", retry=FAST)
    reader = ShardReader(store, "train")
    reader.rows(np.arange(7))
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file where the folder was")
    assert reader.rows(np.arange(100))[:, 0].tolist() == list(range(100))
    assert "block not cached" in caplog.text


def test_a_missing_bucket_is_one_clear_line(bucket):
    with pytest.raises(DataError) as error:
        open_store("s3://no-such-bucket/x").write("a", b"1")
    assert str(error.value) == (
        "s3://no-such-bucket/x: no such bucket; nothing is created for you; create it, or fix its name"
    )


def test_a_cache_smaller_than_a_block_is_refused(aws, tmp_path):
    with pytest.raises(DataError, match="cache_bytes: 1000; a cache holds at least one block"):
        open_store("s3://bucket", cache_dir=tmp_path, cache_bytes=1000)


@pytest.mark.parametrize(("url", "text"), [("gs://b/x", "scheme 'gs'; data lies"), ("s3:///x", "no bucket; a remote")])
def test_other_urls_are_refused(url, text):
    with pytest.raises(DataError, match=text):
        open_store(url)


def test_plain_http_to_another_machine_is_refused(aws, monkeypatch):
    aws(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://192.0.2.1:9000")
    with pytest.raises(DataError, match=r"http://192.0.2.1:9000 is plain HTTP; only loopback may be; use https"):
        open_store("s3://bucket").read("x")


def test_a_forked_child_is_refused_instead_of_hanging(served):
    script = """
        import os
        from data_pipelines import StreamError, open_store
        open_store("s3://bucket").read("train/index.json")
        if os.fork() == 0:
            try:
                open_store("s3://bucket").read("train/index.json")
            except StreamError as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    root = Path(__file__).parents[3]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=root, check=True)
    assert result.stdout.startswith("s3://bucket: read in a forked child; the object store's runtime does not survive")
