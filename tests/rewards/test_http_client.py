"""A client of servers that drip, say nothing or never stop: it is let go in time, and reads no more than it should."""

import gzip
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
import urllib3

from flowgrpo.rewards.serving import exchange
from flowgrpo.rewards.serving.http_client import HttpClient, ServerError, Unavailable

HEAD = b"HTTP/1.1 200 OK\r\n"
# A server that drips gives up after this many pieces, so that a client that waits for it fails the test.
PIECES = 400


class Dripper:
    """A server that answers each connection with one text, and then with a piece every 50 ms."""

    def __init__(self, begin: bytes, piece: bytes, reads: bool = True) -> None:
        self.begin, self.piece, self.reads = begin, piece, reads
        self.stopped, self.exhausted = threading.Event(), False
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.stopped.set()
        self._socket.close()
        self._thread.join(timeout=20)

    def _serve(self) -> None:
        try:
            connection, _ = self._socket.accept()
            with connection:
                if self.reads:
                    connection.recv(1 << 16)
                connection.sendall(self.begin)
                for _ in range(PIECES):
                    connection.sendall(self.piece)
                    if self.stopped.wait(0.05):
                        return
                self.exhausted = True
        except OSError:
            return


@pytest.fixture
def drip() -> Iterator[Callable[..., Dripper]]:
    made: list[Dripper] = []

    def make(*words: bytes, **more: bool) -> Dripper:
        made.append(Dripper(*words, **more))
        return made[-1]

    yield make
    for server in made:
        server.close()


def exchanges() -> int:
    return sum(thread.name == "exchange" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("begin", "piece", "what"),
    [
        (b"", b"", {}),
        (HEAD + b"X-Slow: ", b"x", {}),
        (HEAD, b"", {}),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", {}),
        (HEAD + b"Content-Length: 100000\r\n\r\n", b"x", {}),
        (HEAD + b"Connection: close\r\n\r\n", b"x", {}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", {}),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x", {}),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 100000\r\n\r\n" + gzip.compress(b"")[:10], b"", {}),
        (b"", b"", {"reads": False}),
    ],
    ids=["silence", "a header", "no end of the head", "100", "a body", "no length", "chunks", "a size", "gzip", "deaf"],
)
def test_the_limit_holds_for_the_whole_exchange(
    drip: Callable[..., Dripper], begin: bytes, piece: bytes, what: dict[str, bool]
) -> None:
    server, before = drip(begin, piece, **what), exchanges()
    client = HttpClient("r", f"http://127.0.0.1:{server.port}", timeout=0.5)
    body = b"x" * (64 << 20) if what else b"x"
    with pytest.raises(Unavailable, match=r"no answer within 0.5 s"):
        client.request("POST", "/score", body)
    assert not server.exhausted
    # The thread of the exchange ends without the server's help.
    for thread in threading.enumerate():
        if thread.name == "exchange":
            thread.join(timeout=20)
    assert exchanges() <= before
    assert not server.exhausted


def test_a_send_that_takes_too_long_is_told_as_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of a socket may end before the exchange does; requests then speaks of a broken connection."""

    def request(*args: object, **more: object) -> None:
        aborted = urllib3.exceptions.ProtocolError("Connection aborted.", TimeoutError("timed out"))
        raise requests.exceptions.ConnectionError(aborted)

    monkeypatch.setattr(requests.Session, "request", request)
    with pytest.raises(Unavailable, match=r"no answer within 5 s"):
        HttpClient("r", "http://127.0.0.1:9", timeout=5).request("POST", "/score", b"x")


def test_a_handshake_that_never_ends_has_the_same_limit(drip: Callable[..., Dripper]) -> None:
    server = drip(b"\x16\x03\x03\x40\x00", b"\0")
    with pytest.raises(Unavailable, match=r"no answer within 0.5 s"):
        HttpClient("r", f"https://127.0.0.1:{server.port}", timeout=0.5).request("GET", "/info")
    assert not server.exhausted


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (HEAD + b"Connection: close\r\n\r\n", b"x" * 1_000_000),
        (HEAD + b"Content-Length: 999999999999\r\n\r\n", b"x" * 1_000_000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"),
        (HEAD + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n", gzip.compress(b"\0" * (64 << 20))),
    ],
    ids=["no length", "a length", "chunks", "gzip"],
)
def test_a_reply_that_is_too_large_is_not_read_to_its_end(
    drip: Callable[..., Dripper], begin: bytes, piece: bytes
) -> None:
    server = drip(begin, piece)
    client = HttpClient("r", f"http://127.0.0.1:{server.port}", timeout=60, most_bytes=1 << 20)
    with pytest.raises(ServerError, match="the answer is larger than 1048576 bytes"):
        client.request("GET", "/info")
    assert not server.exhausted


def test_heads_have_a_limit_too(drip: Callable[..., Dripper]) -> None:
    server = drip(HEAD, b"".join(b"X-%d: %s\r\n" % (k, b"x" * 1000) for k in range(200)))
    with pytest.raises(ServerError, match="more than 100 headers"):
        HttpClient("r", f"http://127.0.0.1:{server.port}", timeout=60).request("GET", "/info")
    assert not server.exhausted


def test_connections_are_kept_and_a_closed_client_opens_new_ones() -> None:
    reply = HEAD + b"Content-Length: 2\r\n\r\nok"
    accepted: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for number in range(2):
                connection, _ = listening.accept()
                accepted.append(number)
                with connection:
                    while connection.recv(1 << 16):
                        connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = HttpClient("r", f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=20)
        assert [client.request("GET", "/info").body for _ in range(3)] == [b"ok"] * 3
        assert accepted == [0]
        client.close()
        assert client.request("GET", "/info").body == b"ok"
        assert accepted == [0, 1]
        client.close()
        thread.join(timeout=20)


def test_a_wrong_ca_file_is_said_at_once(tmp_path: Path) -> None:
    empty = tmp_path / "ca.pem"
    empty.write_text("nothing")
    for url, path, message in (
        ("http://127.0.0.1:9", str(empty), "ca_file has no effect without encryption; write https://"),
        ("https://127.0.0.1:9", str(tmp_path / "none.pem"), "give the path of a PEM file as ca_file"),
        ("https://127.0.0.1:9", 5, "there is no file 5"),
        ("https://127.0.0.1:9", str(empty), "no certificate that can be read"),
    ):
        with pytest.raises(ValueError, match=message):
            HttpClient("r", url, ca_file=path)  # type: ignore[arg-type]


def test_a_body_that_stops_is_told_alike_whichever_limit_is_reached_first(
    drip: Callable[..., Dripper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the limit of the socket may be reached before the limit of the exchange."""
    monkeypatch.setattr(exchange, "within", lambda done, seconds: done.wait(seconds + 20))
    server = drip(HEAD + b"Content-Length: 100000\r\n\r\n", b"")
    with pytest.raises(Unavailable, match=r"no answer within 0.5 s"):
        HttpClient("r", f"http://127.0.0.1:{server.port}", timeout=0.5).request("POST", "/score", b"x")
