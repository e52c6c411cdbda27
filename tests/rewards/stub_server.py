"""A server on this machine that gives a test's answers and keeps the requests; and a clock that only `sleep` moves."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes]


def said(text: Any, **choice: Any) -> Reply:
    """A chat completion that says a text."""
    message = {"role": "assistant", "content": text}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}]}
    return 200, {}, json.dumps(body).encode()


def failed(status: int, body: Any = None, **headers: str) -> Reply:
    return status, headers, json.dumps(body).encode() if body is not None else b""


class FakeClock:
    """Seconds that pass only in `sleep`."""

    def __init__(self, on_sleep: Callable[[], object] = lambda: None) -> None:
        self.now, self.pauses, self.on_sleep = 0.0, [], on_sleep

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        self.on_sleep()


class StubServer:
    """Answers every POST with what `answer(request, number)` returns; None hangs up without an answer.

    A request is {"path", "headers", "body"}, with the body read as JSON. `number` counts them from 0.
    """

    def __init__(self, answer: Callable[[dict[str, Any], int], Reply | None]) -> None:
        self.answer, self.requests, self.port = answer, [], 0
        self.in_flight = self.most_in_flight = 0
        self._lock, self._server = threading.Lock(), None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def running(self) -> bool:
        return self._server is not None

    def start(self) -> None:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = {"path": self.path, "headers": dict(self.headers), "body": json.loads(body)}
                reply = stub.handle(request)
                self.close_connection = True
                if reply is None:
                    return
                status, headers, content = reply
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """No further connection is accepted; the port stays known, for another start."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def handle(self, request: dict[str, Any]) -> Reply | None:
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return self.answer(request, number)
        finally:
            with self._lock:
                self.in_flight -= 1

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [request["body"] for request in self.requests]


def question_of(request: dict[str, Any]) -> str:
    """The text of the question that a chat request asks."""
    content = request["body"]["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]
