"""The stream: what a batch holds depends on (seed, position) alone."""

import os
import queue
import signal
import threading
import time

import numpy as np
import pytest

from data_pipelines import DataError, StreamError, TokenStream, valid_rows
from data_pipelines.stream import _end

GOLDEN = [185, 191, 193, 196, 902, 926, 950, 953, 957, 961, 972, 977]  # 4 rows end epoch 3, 8 begin epoch 4


@pytest.fixture(scope="module")
def rows_set(tmp_path_factory, write_set) -> str:
    return write_set(tmp_path_factory.mktemp("set"))


def take(url: str, count: int, **options) -> list:
    stream = TokenStream(url, **options)
    try:
        return [next(stream) for _ in range(count)]
    finally:
        stream.close()


def test_a_batch_has_its_shape_and_whole_rows(rows_set):
    (batch,) = take(rows_set, 1, global_batch=24, micro_batches=3, dp=2, dp_rank=1)
    assert batch.tokens.shape == (3, 4, 4) and batch.tokens.dtype == np.int64
    assert batch.rows.tolist() == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23]]
    np.testing.assert_array_equal(batch.tokens - batch.tokens[..., :1], np.broadcast_to([0, 3, 5, 7], (3, 4, 4)))


@pytest.mark.parametrize(("micro_batches", "dp"), [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (1, 24)])
def test_every_layout_reads_the_same_rows_at_the_same_places(rows_set, micro_batches, dp):
    for step, whole in enumerate(take(rows_set, 3, global_batch=24)):
        place = {}
        for rank in range(dp):
            batch = take(rows_set, 3, global_batch=24, micro_batches=micro_batches, dp=dp, dp_rank=rank)[step]
            place |= dict(zip(batch.rows.ravel().tolist(), batch.tokens[..., 0].ravel().tolist(), strict=True))
        assert [place[i] for i in range(24)] == whole.tokens[0, :, 0].tolist()


def test_a_micro_batch_is_the_same_set_on_any_number_of_ranks(rows_set):
    (one,) = take(rows_set, 1, global_batch=24, micro_batches=2)
    ranks = [take(rows_set, 1, global_batch=24, micro_batches=2, dp=3, dp_rank=r)[0] for r in range(3)]
    for m in range(2):
        np.testing.assert_array_equal(np.concatenate([rank.tokens[m] for rank in ranks]), one.tokens[m])


def test_a_global_batch_is_in_storage_order(rows_set):
    (batch,) = take(rows_set, 1, global_batch=50)
    assert (np.diff(batch.tokens[0, :, 0]) > 0).all()


def test_resume_at_any_position_equals_the_unbroken_stream(rows_set):
    unbroken = take(rows_set, 60, global_batch=24, seed=4)  # 1,440 rows of 1,000: crosses an epoch
    stream = TokenStream(rows_set, global_batch=24, seed=4, dp=2)
    for step in (0, 17, 40, 41, 59):
        (batch,) = take(rows_set, 1, global_batch=24, seed=4, position=24 * step)
        np.testing.assert_array_equal(batch.tokens, unbroken[step].tokens)
    next(stream)
    assert stream.state._asdict() == {"position": 24, "seed": 4}  # not what was read ahead
    stream.close()


def test_epochs_are_complete_and_differ(rows_set):
    batches = take(rows_set, 80, global_batch=25)
    first, second = (np.concatenate([b.tokens[0, :, 0] for b in half]) for half in (batches[:40], batches[40:]))
    assert sorted(first) == sorted(second) == list(range(1000))
    assert (first == second).mean() < 0.2


def test_epochs_follow_without_a_gap_when_a_batch_straddles_them(rows_set):
    ids = np.concatenate([b.tokens[0, :, 0] for b in take(rows_set, 125, global_batch=24)])
    assert np.bincount(ids, minlength=1000).tolist() == [3] * 1000


def test_the_batch_at_a_position_never_changes_between_versions(rows_set):
    """Runs resume by position: a change of these rows breaks every one of them."""
    (batch,) = take(rows_set, 1, global_batch=12, seed=5, position=3996)
    assert batch.tokens[0, :, 0].tolist() == GOLDEN


def test_numpy_integers_give_the_same_order(rows_set):
    (plain,) = take(rows_set, 1, global_batch=12, seed=5, position=1992)
    (numpy,) = take(rows_set, 1, global_batch=12, seed=np.int64(5), position=np.int64(1992))
    np.testing.assert_array_equal(plain.tokens, numpy.tokens)


def test_another_global_batch_reads_the_same_rows_in_the_same_order_of_batches(rows_set):
    small = take(rows_set, 4, global_batch=12)
    (large,) = take(rows_set, 1, global_batch=48)
    assert sorted(np.concatenate([b.tokens[0, :, 0] for b in small])) == large.tokens[0, :, 0].tolist()


def test_valid_rows_are_the_first_as_stored(rows_set):
    assert valid_rows(rows_set, "train", 5)[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert len(valid_rows(rows_set, "train")) == 1000


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"global_batch": 10, "micro_batches": 2, "dp": 2},
            "stream.global_batch: 10; must be a multiple of micro_batches * dp = 2 * 2; change one of them",
        ),
        (
            {"global_batch": 8, "dp": 2, "dp_rank": 2},
            "stream.dp_rank: 2; ranks count from 0 to dp - 1 = 1; change it",
        ),
        (
            {"global_batch": 8, "position": -1},
            "stream.position: -1; counts the rows consumed; must not be negative; change it",
        ),
    ],
)
def test_impossible_layouts_are_refused(rows_set, options, text):
    with pytest.raises(DataError) as error:
        TokenStream(rows_set, **options)
    assert str(error.value) == text


def test_missing_data_is_one_clear_line(tmp_path):
    with pytest.raises(DataError) as error:
        TokenStream(tmp_path / "none", global_batch=1)
    assert str(error.value) == (
        f"{tmp_path}/none: no train/index.json; a stream reads a finished preparation; "
        f"check the path, or run data_pipelines.prepare to the end"
    )


def test_a_flipped_byte_names_shard_block_and_both_hashes(tmp_path, write_set):
    url = write_set(tmp_path)
    path = tmp_path / "train" / "shard-00003.bin"
    data = bytearray(path.read_bytes())
    data[2 * 7 * 8 + 5] ^= 0x10  # in block 2: 7 rows of 8 bytes a block
    path.write_bytes(data)
    stream = TokenStream(url, global_batch=100)
    with pytest.raises(StreamError, match=r"shard-00003.bin: block 2 has xxh3_128 \w{32}, the index says \w{32}; .*;"):
        for _ in range(10):
            next(stream)
    with pytest.raises(StreamError, match="block 2"):  # and again: the stream does not go on
        next(stream)
    stream.close()


def test_a_cut_shard_and_a_lost_shard_are_named(tmp_path, write_set):
    url = write_set(tmp_path)
    path = tmp_path / "train" / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(StreamError, match=r"shard-00000.bin: block 1 has 4 of 56 bytes"):
        valid_rows(url, "train")
    path.unlink()
    with pytest.raises(StreamError, match=r"shard-00000.bin: block 0 has no bytes to read \(No such file"):
        valid_rows(url, "train")


@pytest.mark.parametrize(("old", "new"), [(b'"num_rows": 1000', b'"num_rows": 1001'), (b"{", b"[")])
def test_an_altered_index_is_refused(tmp_path, write_set, old, new):
    url = write_set(tmp_path)
    index = tmp_path / "train" / "index.json"
    index.write_bytes(index.read_bytes().replace(old, new, 1))
    with pytest.raises(StreamError, match=r"train/index.json: (altered|not an index)"):
        TokenStream(url, global_batch=1)


def test_altered_token_bytes_are_refused(tmp_path, write_set):
    url = write_set(tmp_path)
    path = tmp_path / "token_bytes.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(StreamError, match=r"token_bytes.npy: altered; "):
        TokenStream(url, global_batch=1)


def test_closing_or_dropping_a_stream_ends_its_thread(rows_set):
    before = threading.active_count()
    closed, dropped = TokenStream(rows_set, global_batch=8), TokenStream(rows_set, global_batch=8)
    next(dropped)
    closed.close()
    closed.close()
    del dropped
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    with pytest.raises(StreamError, match="stream is closed"):
        next(closed)


def test_a_forked_child_is_refused(rows_set):
    stream = TokenStream(rows_set, global_batch=8)
    next(stream)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(10)  # a child that hangs fails this test
        try:
            next(stream)
        except StreamError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert "stream used in a forked child" in os.read(reader, 1000).decode()
    stream.close()


def test_a_stream_that_its_own_thread_collects_ends_in_silence():
    stop, ready = threading.Event(), queue.Queue()
    _end(stop, ready, threading.current_thread())
    assert stop.is_set()
