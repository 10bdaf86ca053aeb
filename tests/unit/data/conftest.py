"""A tiny tokenizer, synthetic sets whose rows name themselves, and two local S3 servers: one honest, one faulty."""

import http.server
import io
import random
import socket
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from data_pipelines import open_store, train_tokenizer
from data_pipelines.shards import TOKEN_BYTES, ShardIndex, encode_shard

WORDS = "the router sends each token to an expert that knows its kind and combines what comes back weighted".split()


def write_corpus(folder: Path, num_files: int, words_per_file: int) -> Path:
    """Random text, the same every time; one file holds what is hard to encode."""
    draw = random.Random(0)
    folder.mkdir(parents=True)
    for number in range(num_files):
        text = " ".join(draw.choices(WORDS, k=words_per_file)).replace("to ", "to\n    ")
        (folder / f"part-{number:03d}.txt").write_text(f"# {number}\n{text}")
    (folder / "zz.md").write_bytes("tab\tand\r\nünï 日本 🎉 \u2581 \0 end  ".encode())
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", num_files=60, words_per_file=12_000)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    texts = write_corpus(folder / "texts", num_files=40, words_per_file=200)
    (folder / "train.yaml").write_text(f"corpus: {texts}\nvocab_size: 400\noptions: {{hard_vocab_limit: false}}\n")
    train_tokenizer(folder / "train.yaml")
    return folder


@pytest.fixture(scope="session")
def write_set():
    """Write a set of ``num_rows`` rows of 4 tokens; the first token of row r is r."""

    def write(url: str, num_rows: int = 1000, rows_per_block: int = 7, blocks_per_shard: int = 5, split="train") -> str:
        store, vocab_size = open_store(url), num_rows + 10
        rows = (np.arange(num_rows)[:, None] + np.array([0, 3, 5, 7])).astype("<u2")
        token_bytes = np.ones(vocab_size, dtype=np.int64)
        np.save(buffer := io.BytesIO(), token_bytes)
        store.write(TOKEN_BYTES, buffer.getvalue())
        digest = xxh3_128_hexdigest(buffer.getvalue())
        step, shards = rows_per_block * blocks_per_shard, []
        for first in range(0, num_rows, step):
            shard, data = encode_shard(f"shard-{first // step:05d}.bin", rows[first : first + step], rows_per_block)
            store.write(f"{split}/{shard.name}", data)
            shards.append(shard)
        sizes = dict(num_rows=num_rows, rows_per_block=rows_per_block, blocks_per_shard=blocks_per_shard)
        index = ShardIndex(
            dtype="<u2", seq_len=3, vocab_size=vocab_size, bos_id=1, eos_id=2, num_tokens=3 * num_rows,
            num_bytes=3 * num_rows, fingerprint="f", token_bytes_digest=digest, shards=shards, **sizes,
        )  # fmt: skip
        store.write(f"{split}/index.json", index.to_json())
        return str(url)

    return write


@pytest.fixture
def aws(monkeypatch):
    """Point the standard AWS environment at a server on this machine."""

    def use(port: int) -> None:
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ALLOW_HTTP", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")

    return use


@pytest.fixture(scope="session")
def moto_port():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT"), timeout=10)
    yield port
    server.stop()


@pytest.fixture
def bucket(moto_port, aws) -> str:
    aws(moto_port)
    return "s3://bucket"


class FaultServer(http.server.ThreadingHTTPServer):
    """Serves a folder as ``/bucket/...``; ``faults`` are used up one per request, in order."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _FaultHandler)
        self.folder, self.faults, self.requests = folder, [], []


class _FaultHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.removeprefix("/bucket/")
        self.server.requests.append(name)
        fault = self.server.faults.pop(0) if self.server.faults else None
        path = self.server.folder / name
        if fault in ("500", "503", "403"):
            return self._answer(int(fault), b"<Error/>")
        if not path.is_file():
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        if fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        return self._body(path.read_bytes(), fault)

    def _body(self, data: bytes, fault: str | None) -> None:
        asked = self.headers.get("Range")
        first, last = map(int, asked.removeprefix("bytes=").split("-")) if asked else (0, len(data) - 1)
        body = data[first : last + 1]
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"} if asked else {}
        if fault == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        self._answer(206 if asked else 200, body, headers, cut=len(body) // 2 if fault == "short" else None)

    def _answer(self, status: int, body: bytes, headers: dict | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Fri, 20 Nov 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None:
            self.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def fault_server(tmp_path, aws):
    """A server of ``tmp_path / "served"`` at ``s3://bucket``."""
    server = FaultServer(tmp_path / "served")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    aws(server.server_address[1])
    yield server
    server.shutdown()
    server.server_close()
