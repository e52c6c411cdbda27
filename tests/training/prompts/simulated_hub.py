"""A server on this machine that answers as the hub does, for one data set, owner/name."""

import hashlib
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

COMMIT = "a" * 40
_API = "/api/datasets/owner"


class SimulatedHub:
    """The server, as a context manager.

    Args:
        folder: the files of the data set.

    Attributes:
        asked: paths of all requests.
        sent: files whose content was asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self.sent: list[str] = []
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(files, self.asked, self.sent))
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "SimulatedHub":
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(files: dict[str, Path], asked: list[str], sent: list[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(self.path)
            url = urllib.parse.urlsplit(self.path)
            path = urllib.parse.unquote(url.path)
            if path.startswith(f"{_API}/name/tree/{COMMIT}"):
                below = path.removeprefix(f"{_API}/name/tree/{COMMIT}").strip("/")
                return self._json(_tree(files, below, "recursive=true" in url.query.lower()))
            if path.startswith(f"/datasets/owner/name/resolve/{COMMIT}/"):
                return self._file(path.removeprefix(f"/datasets/owner/name/resolve/{COMMIT}/"))
            if path in (f"{_API}/name", f"{_API}/name/revision/main", f"{_API}/name/revision/{COMMIT}"):
                listed = [{"rfilename": name} for name in files]
                return self._json({"id": "owner/name", "sha": COMMIT, "tags": [], "siblings": listed})
            codes = {f"{_API}/closed": (403, "GatedRepo"), f"{_API}/broken": (500, "")}
            revision = path.startswith(f"{_API}/name/revision/")
            status, code = codes.get(path, (404, "RevisionNotFound" if revision else "RepoNotFound"))
            self._answer(status, b"{}", {"X-Error-Code": code})

        def _json(self, value: Any) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _file(self, name: str) -> None:
            if name not in files:
                return self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            if self.command == "GET":
                sent.append(name)
            content = files[name].read_bytes()
            tag = hashlib.sha1(content).hexdigest()
            self._answer(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


def _tree(files: dict[str, Path], below: str, recursive: bool) -> list[dict[str, Any]]:
    start = f"{below}/" if below else ""
    found: dict[str, dict[str, Any]] = {}
    for name, path in files.items():
        if not name.startswith(start):
            continue
        first, *rest = name.removeprefix(start).split("/")
        if rest:
            found[start + first] = {"type": "directory", "path": start + first, "oid": "0" * 40, "size": 0}
        if recursive or not rest:
            oid = hashlib.sha1(path.read_bytes()).hexdigest()
            found[name] = {"type": "file", "path": name, "oid": oid, "size": path.stat().st_size}
    return list(found.values())
