"""Any reward over HTTP: `flowgrpo rewards serve`.

    POST /score     takes a request as in `wire.py`, and answers with the scores
    GET  /info      the reward's declaration and the server's limits
    GET  /health    "ok" or "stopping"
    GET  /metrics   counts, in the text format of Prometheus

Every connection carries one request. All costs of a request are limited in advance: who may send requests, how many at
a time, how many bytes, how large the images are, and how long the reading may take.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..base import InvalidScores
from . import wire
from .declaration import Declaration
from .http_client import is_local
from .service import Full, RequestAbandoned, Service, Stopping
from .wire import WireLimits

SILENT_SECONDS = 30.0
READ_SECONDS = 600.0
DRAIN_SECONDS = 10.0
DRAIN_BYTES = 64 << 20
MOST_CONNECTIONS = 128
CHUNK = 1 << 20


class Refused(Exception):
    """A request is refused, and gets an error in place of scores.

    Attributes:
        status: HTTP status.
        more: additional fields of the answer.
        pause: seconds after which the client should try again, or None.
    """

    def __init__(self, status: int, message: str, pause: int | None = None, **more: Any) -> None:
        super().__init__(message)
        self.status, self.pause, self.more = status, pause, more


class RewardServer(ThreadingHTTPServer):
    """Listens for requests and hands them to a `Service`.

    Args:
        service: the service that scores the requests; it must run in another thread than `serve_forever`.
        declaration: the declaration of the reward of `service`.
        host: address on which the server listens.
        port: port on which the server listens; 0 chooses a free one, which is then in `server_port`.
        token: token that every request must have; None accepts requests from everybody who can reach the address.
        limits: limits of a request.
        clock: function that returns the time in seconds, for the reading of requests.

    Raises:
        ValueError: other machines could reach the address, but there is no token.
        OSError: the server cannot listen on the address.
    """

    daemon_threads = False
    block_on_close = True
    allow_reuse_address = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(
        self,
        service: Service,
        declaration: Declaration,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: WireLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_host(host, token)
        self.service, self.declaration, self.limits, self.clock = service, declaration, limits or WireLimits(), clock
        self._token = None if token is None else _digest(token)
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind the address without looking up its name, because the look-up can take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def allows(self, header: str | None) -> bool:
        """Whether an Authorization header has the right token; the time of this check does not depend on the header."""
        if self._token is None:
            return True
        given = (header or "").removeprefix("Bearer ").strip()
        return hmac.compare_digest(_digest(given), self._token)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a separate thread, or hang up if there are too many connections."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and release the place of the connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the client notices a broken connection itself."""


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"
    timeout = SILENT_SECONDS

    def do_GET(self) -> None:
        service = self.server.service
        if self.path == "/health":
            status = "stopping" if service.stopping else "ok"
            return self._send(503 if service.stopping else 200, _json({"status": status}))
        if self.path not in ("/info", "/metrics"):
            return self._refuse(Refused(404, "there are /score, /info, /health and /metrics"))
        if not self.server.allows(self.headers.get("Authorization")):
            return self._refuse(_unknown())
        if self.path == "/info":
            return self._send(200, _json(self._info()))
        gauges = {
            "admitted": ("Requests that are read, waiting or scored.", service.admitted),
            "places": ("Largest number of these requests.", service.waiting + 1),
        }
        self._send(200, service.metrics.text(gauges).encode(), "text/plain; version=0.0.4")

    def do_POST(self) -> None:
        try:
            if self.path != "/score":
                raise Refused(404, "requests to score go to /score")
            if not self.server.allows(self.headers.get("Authorization")):
                raise _unknown()
            body = self._score(self._length())
        except Refused as refused:
            self.server.service.metrics.answered(refused.status)
            self._refuse(refused)
        except RequestAbandoned:
            self.close_connection = True
        else:
            self.server.service.metrics.answered(200)
            self._send(200, body)

    def version_string(self) -> str:
        """Return the name without versions, because versions mainly help an attacker."""
        return "flowgrpo"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the metrics count the requests, and the service reports the failures."""

    def _score(self, length: int) -> bytes:
        service = self.server.service
        try:
            with service.admit():
                inputs = self._inputs(self._read(length))
                return wire.pack_scores(service.score(inputs, self._abandoned))
        except Full:
            raise Refused(503, "the queue of requests is full", pause=1) from None
        except Stopping:
            raise Refused(503, "the server is ending", pause=5) from None
        except InvalidScores as error:
            raise Refused(422, str(error), index=error.index) from None
        except ValueError as error:
            raise Refused(400, str(error)) from None
        except RuntimeError as error:
            raise Refused(500, str(error)) from None

    def _length(self) -> int:
        """Return the number of bytes that the request declares.

        Raises:
            Refused: the request does not declare its length, is too long, or is not a request to score.
        """
        given = self.headers.get_all("Content-Length") or []
        if len(given) != 1 or not (given[0].isascii() and given[0].isdigit()) or self.headers["Transfer-Encoding"]:
            raise Refused(411, "send one Content-Length, and no Transfer-Encoding")
        # Browsers ask for permission before they send this content type to another origin. So a web page cannot use the
        # server.
        if self.headers.get("Content-Type") != wire.CONTENT_TYPE:
            raise Refused(415, f"send Content-Type {wire.CONTENT_TYPE}")
        length, most = int(given[0][:20]), self.server.limits.most_bytes
        if length > most:
            raise Refused(413, f"{length} bytes are more than {most}; send fewer samples at a time")
        return length

    def _read(self, length: int) -> bytearray:
        deadline, body, start = self.server.clock() + READ_SECONDS, bytearray(length), 0
        while start < length:
            try:
                count = self.rfile.readinto1(memoryview(body)[start : start + CHUNK])  # type: ignore[attr-defined]
            except OSError:
                count = 0
            start += count
            if not count or self.server.clock() > deadline:
                raise Refused(408, f"{length - start} of {length} bytes were not received in time")
        self.server.service.metrics.received(length)
        return body

    def _inputs(self, body: bytearray) -> Any:
        inputs, serves = wire.unpack(body, self.server.limits)
        if serves != self.server.declaration.fingerprint:
            raise Refused(409, "the request is for another reward", **self._info())
        return inputs

    def _info(self) -> dict[str, Any]:
        declaration, limits = self.server.declaration, wire.limits_as_json(self.server.limits)
        return {"version": wire.VERSION, "declaration": declaration.as_json(), "limits": limits}

    def _abandoned(self) -> bool:
        """Whether the client has hung up: after its request, a client sends nothing but the end of the stream."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _refuse(self, refused: Refused) -> None:
        headers = {} if refused.pause is None else {"Retry-After": str(refused.pause)}
        self._send(refused.status, _json({"error": str(refused), **refused.more}), headers=headers)
        self._drain()

    def _drain(self) -> None:
        """Read the rest of the request: a client that is still sending would not see the answer otherwise."""
        deadline, size = self.server.clock() + DRAIN_SECONDS, 0
        try:
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(DRAIN_SECONDS)
            while size < DRAIN_BYTES and self.server.clock() < deadline:
                part = self.rfile.read1(CHUNK)
                if not part:
                    return
                size += len(part)
        except OSError:
            return

    def _send(
        self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Connection": "close", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def check_host(host: str, token: str | None) -> None:
    """Refuse an address that other machines can reach, if there is no token.

    Raises:
        ValueError: other machines can reach the address, and there is no token.
    """
    if token is None and not is_local(host):
        raise ValueError(
            f"{host} can be reached from other machines: name an environment variable that holds a token "
            "(--token-env NAME), or serve at 127.0.0.1"
        )


def _unknown() -> Refused:
    return Refused(401, "send the token as 'Authorization: Bearer TOKEN'")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
