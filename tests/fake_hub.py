"""A hub of models on loopback: as much of its protocol as pushing and fetching a repository need."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: dict[str, dict[str, bytes]]  # repository -> file -> content
    large: dict[str, bytes]  # content by its sha256

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = "/".join(filter(None, (wanted.get("organization") or "zoo", wanted["name"])))
            self.repositories.setdefault(name, {})
            return self._answer({"url": f"{self._base()}/{name}"})
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            files = [f["path"] for f in json.loads(body)["files"]]
            modes = ("lfs" if name.endswith(".safetensors") else "regular" for name in files)
            rows = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in zip(files, modes, strict=True)]
            return self._answer({"files": rows})
        if path.endswith("/info/lfs/objects/batch"):
            return self._answer({"transfer": "basic", "objects": [self._place(o) for o in json.loads(body)["objects"]]})
        if path.endswith("/commit/main"):
            name = path.removeprefix("/api/models/").removesuffix("/commit/main")
            self._commit(name, body)
            return self._answer({"commitUrl": f"{self._base()}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        return self._answer({"error": f"no such door: {path}"}, 404)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(body).hexdigest() == self.path.rsplit("/", 1)[1]
        self.large[self.path.rsplit("/", 1)[1]] = body
        self._answer({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/"):
            name = "/".join(path.split("/")[3:5])
            if name not in self.repositories:
                return self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            if "/tree/" in path:
                return self._answer([_entry(*item) for item in self.repositories[name].items()])
            siblings = [{"rfilename": file} for file in self.repositories[name]]
            return self._answer({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []})
        parts = path.strip("/").split("/")  # owner, repository, "resolve", revision, file
        content = self.repositories.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
        if content is None:
            return self._answer({}, 404, {"X-Error-Code": "EntryNotFound"})
        etag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._send(200, content, etag)

    def _place(self, wanted: dict) -> dict:
        upload = {"href": f"{self._base()}/large/{wanted['oid']}", "header": {}}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": upload}}

    def _commit(self, name: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repositories[name][value["path"]] = self.large[value["oid"]]

    def _base(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def _answer(self, values: dict | list, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(code, json.dumps(values).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _entry(path: str, content: bytes) -> dict:
    digest = hashlib.sha256(content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": digest}


@contextmanager
def fake_hub() -> Iterator[tuple[str, dict[str, dict[str, bytes]]]]:
    """(its address, repository -> file -> content)."""
    repositories: dict[str, dict[str, bytes]] = {}
    handler = type("Hub", (_Hub,), {"repositories": repositories, "large": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", repositories
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
