"""Any reward over HTTP: `flowgrpo rewards serve`.

    POST /score     takes a request as in `wire.py`, and answers with the scores
    GET  /info      the reward's declaration and the server's limits
    GET  /health    "ok" or "stopping"
    GET  /metrics   counts, in the text format of Prometheus

Every connection carries one request. All costs of a request are limited in advance: who may send requests, how many at
a time, how many bytes each and all together, how large the images are, and until when a request must have arrived. The
limits are times on the clock, and not seconds of silence, so sending a byte now and then does not extend them.

Why the server of the standard library: servers such as uvicorn and waitress limit the seconds of silence between two
requests, and are made to stand behind a proxy that limits the rest. None of them spares a user the proxy or the limits
below, and each would be one more package that a reward's environment needs. The standard library's server reads heads
and starts threads; `Connections`, `Budget` and `Incoming` have the limits.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..base import InvalidScores
from . import wire
from .budget import Budget, NoMemory, TooLarge, pages
from .connections import Connections, Incoming, Outgoing, TooLong, handshake
from .declaration import Declaration
from .hosts import HostNames, check_host
from .service import Full, RequestAbandoned, Service, Stopping
from .wire import WireLimits

# The head of a request, with the handshake of TLS.
HEAD_SECONDS = 30.0
HEAD_BYTES = 16 << 10
# A body may take READ_SECONDS in all. It may lag BODY_SECONDS behind LEAST_RATE bytes a second.
READ_SECONDS = 600.0
BODY_SECONDS = 30.0
LEAST_RATE = 256 << 10
REPLY_SECONDS = 30.0
DRAIN_SECONDS = 10.0
DRAIN_BYTES = 64 << 20
DRAIN_CHUNK = 64 << 10
# What a server that ends still waits for senders and receivers.
END_SECONDS = 5.0
# Connections that hold no place in the queue.
MOST_CONNECTIONS = 128
# More threads than connections, because the thread of a closed connection needs a moment to end.
SPARE_THREADS = 32
CHUNK = 1 << 20
# In addition to the images of a request: its texts take more memory than bytes on the way.
TEXT_BYTES = 64 << 20


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
        memory: bytes that all requests may take together, at least twice the largest request; None: as many as two of
            the largest requests, and 64 MiB.
        names: further names for which the server answers, see `HostNames`.
        encryption: certificate and key; None serves without encryption.
        clock: function that returns the time in seconds, for the reading of requests.

    Raises:
        ValueError: other machines could reach the address, but there is no token or a short one; `memory` is too small;
            or one of `names` is no name.
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
        memory: int | None = None,
        names: Sequence[str] = (),
        encryption: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_host(host, token)
        self.service, self.declaration, self.limits, self.clock = service, declaration, limits or WireLimits(), clock
        self.budget = Budget(check_memory(memory, self.limits))
        self.names, self.encryption = HostNames(host, names), encryption
        self.connections = Connections(MOST_CONNECTIONS)
        self._token = None if token is None else _digest(token)
        self._threads_left = threading.BoundedSemaphore(MOST_CONNECTIONS + service.waiting + 1 + SPARE_THREADS)
        self._host = host
        self._stopped: float | None = None
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the server, for clients on a machine that can reach it."""
        # A server that listens on all addresses answers for the name of its machine.
        name = socket.gethostname() if self._host in ("0.0.0.0", "::", "") else self._host
        host = f"[{name}]" if ":" in name else name
        return f"{'http' if self.encryption is None else 'https'}://{host}:{self.server_port}"

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

    def deadline(self, began: float, end: float) -> float:
        """Return when something ends that began at `began` and would end at `end`; sooner if the server is ending."""
        if not self.service.stopping:
            return end
        if self._stopped is None:
            self._stopped = self.clock()
        return min(end, max(began, self._stopped) + END_SECONDS)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Its encryption begins in its own thread."""
        connection, address = super().get_request()
        if self.encryption is None:
            return connection, address
        try:
            return self.encryption.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address
        except (OSError, ValueError) as error:
            connection.close()
            # The loop of the server goes on after this kind of exception.
            raise OSError(str(error)) from None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a separate thread. If there are too many connections, the oldest is closed, and its thread ends."""
        self.connections.add(request)
        if not self._threads_left.acquire(timeout=1):
            self.connections.remove(request)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.connections.remove(request)
            self._threads_left.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and forget the connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.remove(request)
            self._threads_left.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the client notices a broken connection itself."""


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """Read and write under deadlines."""
        server, self.connection = self.server, self.request
        self._limit(HEAD_SECONDS)
        self._incoming = Incoming(self.connection, self._deadline, server.clock)
        self._incoming.most = HEAD_BYTES
        self.rfile = io.BufferedReader(self._incoming)
        self.wfile = Outgoing(self.connection, self._deadline, server.clock)
        self._expects = False
        if server.encryption is not None:
            handshake(self.connection, self._deadline, server.clock)

    def handle(self) -> None:
        """Answer the one request of the connection."""
        self.close_connection = True
        try:
            self.handle_one_request()
        except TooLong:
            # Attributes that a whole head would have set.
            self.request_version, self.requestline, self.command = self.protocol_version, "", ""
            self._refuse(Refused(431, f"the head of a request has {HEAD_BYTES} bytes at most; send fewer headers"))

    def handle_expect_100(self) -> bool:
        """Ask for the body later: not before the token and the length are known to be right."""
        self._expects = True
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the library does not understand as all others are answered, in JSON."""
        if not hasattr(self, "request_version"):
            self.request_version = self.protocol_version
        self._refuse(Refused(int(code), message or "the request cannot be read"))

    def do_GET(self) -> None:
        try:
            self._answer_get()
        except Refused as refused:
            self._refuse(refused)

    def do_POST(self) -> None:
        service = self.server.service
        try:
            self._check_host()
            if self.path != "/score":
                raise Refused(404, "requests to score go to /score")
            self._check_token()
            length = self._length()
            # The place is given back when the answer is sent: a client that does not read it holds only its own place.
            with self.server.connections.keep(self.connection), ExitStack() as held:
                body = self._score(length, held)
                service.metrics.answered(200)
                self._send(200, body)
        except Refused as refused:
            service.metrics.answered(refused.status)
            self._refuse(refused)
        except RequestAbandoned:
            self.close_connection = True

    def _answer_get(self) -> None:
        service = self.server.service
        self._check_host()
        if self.path == "/health":
            status = "stopping" if service.stopping else "ok"
            return self._send(503 if service.stopping else 200, _json({"status": status}))
        if self.path == "/score":
            raise Refused(405, "requests to score are sent with POST")
        if self.path not in ("/info", "/metrics"):
            raise Refused(404, "there are /score, /info, /health and /metrics")
        self._check_token()
        if self.path == "/info":
            return self._send(200, _json(self._info()))
        gauges = {
            "admitted": ("Requests that are read, waiting, scored or answered.", service.admitted),
            "places": ("Largest number of these requests.", service.waiting + 1),
            "request_bytes": ("Bytes that these requests may take.", self.server.budget.taken),
            "most_request_bytes": ("Largest number of these bytes.", self.server.budget.most),
        }
        self._send(200, service.metrics.text(gauges).encode(), "text/plain; version=0.0.4")

    def _check_host(self) -> None:
        given = self.headers.get_all("Host") or []
        if len(given) != 1:
            raise Refused(400, "send one header Host")
        host = given[0].strip()
        if not self.server.names.match(host):
            raise Refused(
                421,
                f"this server does not answer for the host {host[:100]!r}; use its address, or start it with this name "
                "as --host-name",
            )

    def _check_token(self) -> None:
        given = self.headers.get("Authorization")
        if not self.server.allows(given):
            raise Refused(
                401,
                "send the token as 'Authorization: Bearer TOKEN'"
                if given is None
                else "this is not the token of this server",
            )

    def _limit(self, seconds: float, rate: float = float("inf"), most: float = float("inf")) -> None:
        """From now on, reading and writing may take `seconds`, and more as `_received` grows."""
        self._began, self._seconds, self._rate, self._most = self.server.clock(), seconds, rate, most
        self._received = 0

    def _deadline(self) -> float:
        end = self._began + min(self._seconds + self._received / self._rate, self._most)
        return self.server.deadline(self._began, end)

    def version_string(self) -> str:
        """Return the name without versions, because versions mainly help an attacker."""
        return "flowgrpo"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the metrics count the requests, and the service reports the failures."""

    def _score(self, length: int, held: ExitStack) -> bytes:
        """Return the answer; the request holds its place and its memory as long as `held`."""
        service, budget = self.server.service, self.server.budget
        try:
            held.enter_context(service.admit())
            take = held.enter_context(budget.share())
            take(length)
            inputs = self._inputs(self._read(length), take)
            return wire.pack_scores(service.score(inputs, self._abandoned))
        except Full:
            raise Refused(503, "the queue of requests is full; try again later", pause=1) from None
        except (NoMemory, MemoryError):
            raise Refused(503, "other requests take the memory for requests; try again later", pause=1) from None
        except TooLarge as error:
            raise Refused(
                413,
                f"the request would take {error.args[0]} bytes of memory, and all requests have {budget.most}; set a "
                "smaller batch_size, or start the server with a larger --memory-mb",
            ) from None
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

    def _read(self, length: int) -> memoryview:
        """Return the body. Pages of its memory are used as their bytes arrive, so an announced size costs nothing."""
        self._incoming.most = None
        self._limit(BODY_SECONDS, LEAST_RATE, READ_SECONDS)
        body = pages(length)
        try:
            if self._expects:
                self.send_response_only(100)
                self.end_headers()
            while self._received < length:
                part = body[self._received : self._received + CHUNK]
                count = self.rfile.readinto1(part)  # type: ignore[attr-defined]
                if not count:
                    break
                self._received += count
        except OSError:
            pass
        if self._received < length:
            raise Refused(
                408,
                f"{length - self._received} of {length} bytes were not received in time; send {LEAST_RATE} bytes a "
                "second or more",
            )
        self.server.service.metrics.received(length)
        return body

    def _inputs(self, body: memoryview, take: Callable[[int], None]) -> Any:
        inputs, serves = wire.unpack(body, self.server.limits, take)
        if serves != self.server.declaration.fingerprint:
            raise Refused(409, "the request is for another reward", **self._info())
        return inputs

    def _info(self) -> dict[str, Any]:
        declaration, limits = self.server.declaration, wire.limits_as_json(self.server.limits)
        return {"version": wire.VERSION, "declaration": declaration.as_json(), "limits": limits}

    def _abandoned(self) -> bool:
        """Whether the client has hung up: after its request, a client sends nothing but the end of the stream."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                if not selector.select(0):
                    return False
            # An encrypted end of the stream is a message.
            return self.server.encryption is not None or not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _refuse(self, refused: Refused) -> None:
        headers = {} if refused.pause is None else {"Retry-After": str(refused.pause)}
        self._send(refused.status, _json({"error": str(refused), **refused.more}), headers=headers)
        self._drain()

    def _drain(self) -> None:
        """Read the rest of the request: a client that is still sending would not see the answer otherwise."""
        self._incoming.most = DRAIN_BYTES
        self._limit(DRAIN_SECONDS)
        try:
            self.connection.shutdown(socket.SHUT_WR)
            while self.rfile.read1(DRAIN_CHUNK):  # type: ignore[attr-defined]
                pass
        except (OSError, TooLong):
            return

    def _send(
        self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        self._limit(REPLY_SECONDS)
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Connection": "close", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


def check_memory(memory: int | None, limits: WireLimits) -> int:
    """Return how many bytes all requests may take together.

    Raises:
        ValueError: the largest request would not fit: its bytes, and what they are unpacked to.
    """
    if memory is None:
        return 2 * limits.most_bytes + TEXT_BYTES
    if memory < 2 * limits.most_bytes:
        raise ValueError(
            f"--memory-mb {memory >> 20} is too little for requests of {limits.most_bytes >> 20} MB, which are "
            f"unpacked to as much again; give --memory-mb {2 * limits.most_bytes >> 20} or more, or a smaller --max-mb"
        )
    return memory


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
