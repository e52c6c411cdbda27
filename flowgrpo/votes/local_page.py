"""A page for the browser of this machine alone.

Other pages of the same browser, and other programs of the machine, can reach a local port. So every address begins
with a random token. The Host must be ours, because an attacker may point a name of their own at this machine. What a
person says must come as JSON, which a form of another site cannot send.
"""

import hmac
import json
import secrets
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LONGEST = 1024  # bytes of a request's body
DRAINED = 1 << 20  # a body that is too long is still read up to this number of bytes, so that the answer arrives
POLICY = (
    "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; media-src 'self' "
    "blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageRefused(Exception):
    """A request that is refused, with a status and a message for the page."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class PageServer(ThreadingHTTPServer):
    """Serves a page on 127.0.0.1.

    Args:
        handler: answers the requests.
        port: port to listen at; 0 for any free port.
        mend: what to write instead, if the port cannot be used.

    Raises:
        ValueError: the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, handler: type["PageHandler"], port: int, mend: str) -> None:
        try:
            super().__init__(("127.0.0.1", port), handler)
        except OSError as error:
            raise ValueError(f"the port {port} of 127.0.0.1 cannot be used ({error.strerror}); {mend}") from error
        self.token = secrets.token_urlsafe(24)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the page was only closed before its answer came."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


class PageHandler(BaseHTTPRequestHandler):
    """One request; a subclass has `get` and `post`, which take the parts of the address after the token."""

    server: PageServer
    timeout = 30  # seconds that a silent client may hold its thread
    server_version, sys_version = "flowgrpo", ""

    def get(self, place: list[str]) -> None:
        """Answer a request for something."""
        raise NotImplementedError

    def post(self, place: list[str]) -> None:
        """Answer a request that says something."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self._answer(self.get)

    def do_POST(self) -> None:
        self._answer(self.post)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer errors of the base class as JSON, with the headers of all other answers."""
        self.send_object(code, {"error": message or "refused"})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the addresses hold the token."""

    def _answer(self, act: Callable[[list[str]], None]) -> None:
        try:
            act(self._place())
        except PageRefused as refused:
            self.send_object(refused.status, {"error": str(refused)})
        except ValueError as error:  # somebody may have changed a file meanwhile
            self.send_object(500, {"error": str(error)})

    def _place(self) -> list[str]:
        """The parts of the address after the token."""
        hosts = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}
        asked = self.headers.get_all("Host", [])
        if len(asked) != 1 or asked[0] not in hosts:
            raise PageRefused(403, "this page is for this machine only; open the address that the command printed")
        origin = self.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in hosts:
            raise PageRefused(403, "another site may not use this page")
        start, _, address = self.path.partition("?")[0].partition("/")  # an address may also be `*` alone
        token, *rest = address.split("/")
        if start or not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            raise PageRefused(403, "the address is not from this session; open the address that the command printed")
        return rest

    def body(self, longest: int = LONGEST) -> dict[str, Any]:
        """The JSON object in the body of the request.

        Raises:
            PageRefused: the body is too long, or holds something else.
        """
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or "Transfer-Encoding" in self.headers:
            raise PageRefused(411, "a choice must be sent with a Content-Length")
        size = int(length) if len(length) <= 12 else sys.maxsize
        if size > longest:
            if size <= DRAINED:
                self.rfile.read(size)
            raise PageRefused(413, f"the body is longer than {longest} bytes")
        if self.headers.get_content_type() != "application/json":
            raise PageRefused(415, "a choice must be sent as application/json")
        try:
            found = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError) as error:
            raise PageRefused(400, "the body is not JSON") from error
        return found if isinstance(found, dict) else {}

    def send_object(self, status: int, data: dict[str, Any]) -> None:
        """Answer with a JSON object."""
        self.send_content(status, "application/json", json.dumps(data).encode())

    def send_content(self, status: int, kind: str, content: bytes, *, kept: bool = False) -> None:
        """Answer with some bytes; with `kept` the browser may keep them."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        # The page loads the next pictures in advance. Each start has a new token, so no kept picture can be stale.
        self.send_header("Cache-Control", "private, max-age=86400" if kept else "no-store")
        self.end_headers()
        self.wfile.write(content)


def number_in(text: str) -> int:
    """The number that a part of an address is.

    Raises:
        PageRefused: it is no number.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise PageRefused(404, "there is nothing of this number")
    return int(text)
