"""A small server that answers as the hub does what its client asks to make a repository and to upload a commit."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

TOKEN = "hf_of_a_test"


class Hub(ThreadingHTTPServer):
    """Repositories in memory.

    Attributes:
        private: repository -> whether it is private.
        files: repository -> files by name.
        messages: messages of the commits.
        requests: method and path of each request.
        readers: whether the token may only read.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.requests: list[tuple[str, str]] = []
        self.blobs: dict[str, bytes] = {}
        self.readers = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving() -> Iterator[Hub]:
    """A running server."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def use(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    """Let the client of this process speak to the server, without its `xet` transfer, which needs further servers."""
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    patch.setenv("HF_TOKEN", TOKEN)


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._take()
        self._describe(self._repository())

    def do_PUT(self) -> None:
        held = self._take()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(held).hexdigest() == oid
        self.server.blobs[oid] = held
        self._answer({})

    def do_POST(self) -> None:
        held = self._take()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "Invalid credentials in Authorization header")
        elif self.path == "/api/validate-yaml":
            head = json.loads(held)["content"].split("---\n")[1]
            errors = [] if isinstance(yaml.safe_load(head), dict) else [{"message": "no mapping"}]
            self._answer({"errors": errors, "warnings": []})
        elif self.server.readers:
            self._refuse(403, "this token may only read")
        elif self.path == "/api/repos/create":
            self._create(json.loads(held))
        elif self.path.endswith("/preupload/main"):
            modes = {
                entry["path"]: entry["path"].endswith((".safetensors", ".pt")) for entry in json.loads(held)["files"]
            }
            rows = [{"path": name, "uploadMode": "lfs" if large else "regular"} for name, large in modes.items()]
            self._answer({"files": [row | {"shouldIgnore": False} for row in rows]})
        elif self.path.endswith("/objects/batch"):
            self._answer({"objects": [self._slot(entry) for entry in json.loads(held)["objects"]]})
        else:
            assert self.path.endswith("/commit/main"), self.path
            self._commit([json.loads(line) for line in held.splitlines()])

    def _take(self) -> bytes:
        self.server.requests.append((self.command, self.path))
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _repository(self) -> str:
        return "/".join(self.path.removeprefix("/api/models/").split("/")[:2])

    def _describe(self, name: str) -> None:
        if name not in self.server.private:
            return self._refuse(404, "Repository not found", {"X-Error-Code": "RepoNotFound"})
        self._answer({"id": name, "private": self.server.private[name], "sha": "0" * 40, "siblings": [], "tags": []})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        # Older clients say `private`, newer ones `visibility`.
        self.server.private[name] = asked.get("private") is True or asked.get("visibility") == "private"
        self.server.files[name] = {}
        self._answer({"url": f"{self.server.url}/{name}"})

    def _slot(self, entry: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.server.url}/blobs/{entry['oid']}", "header": {}}
        return {"oid": entry["oid"], "size": entry["size"], "actions": {"upload": upload}}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        name = self._repository()
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
            elif line["key"] == "file":
                self.server.files[name][value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                self.server.files[name][value["path"]] = self.server.blobs[value["oid"]]
        self._answer({"commitUrl": f"{self.server.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40})

    def _refuse(self, status: int, message: str, more: dict[str, str] | None = None) -> None:
        self._answer({"error": message}, status, {"X-Error-Message": message, **(more or {})})

    def _answer(self, value: Any, status: int = 200, more: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(more or {})}.items():
            self.send_header(key, text)
        self.end_headers()
        self.wfile.write(body)
