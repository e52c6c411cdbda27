"""A server of rewards under attack in this process: drips, hung clients, wrong hosts, short tokens, and its encryption.

Deadlines are shortened, and the attackers go on for much longer than the tests need.
"""

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.rewards import Scores
from flowgrpo.rewards.inputs import Inputs
from flowgrpo.rewards.remote import Remote
from flowgrpo.rewards.serving import server as server_module
from flowgrpo.rewards.serving import wire
from flowgrpo.rewards.serving.budget import Budget, NoMemory, TooLarge
from flowgrpo.rewards.serving.encryption import server_context
from flowgrpo.rewards.serving.hosts import HostNames, check_host
from flowgrpo.rewards.serving.serve import serve
from flowgrpo.rewards.serving.wire import WireLimits
from tests.rewards.certificate import CERTIFICATE, ENCRYPTED_KEY, KEY
from tests.rewards.served import Served

TOKEN = "a-token-of-20-letters"
# Attackers give up after this many bytes, one every 20 ms: after a minute or more.
BYTES = 3000
# The beginning of a message of TLS of 16384 bytes.
HANDSHAKE = b"\x16\x03\x01\x40\x00"


def images(count: int = 2, side: int = 4) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def body(server: Served, encoding: str = "float32", **more: Any) -> bytes:
    given = {"samples": images(), "prompts": ["p"] * 2, "columns": {}, "groups": None, **more}
    return wire.pack(Inputs(**given), server.declaration.fingerprint, encoding)


def head(length: int | str, *more: str, token: str | None = TOKEN, host: str = "localhost") -> bytes:
    lines = [
        "POST /score HTTP/1.1", f"Host: {host}", f"Content-Type: {wire.CONTENT_TYPE}", f"Content-Length: {length}",
        *([] if token is None else [f"Authorization: Bearer {token}"]), *more,
    ]  # fmt: skip
    return "\r\n".join((*lines, "", "")).encode()


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def ask(server: Served, content: bytes, path: str = "/score", **headers: str) -> tuple[int, dict[str, Any]]:
    """The status and the answer of a request with the token."""
    given = {"Content-Type": wire.CONTENT_TYPE, "Authorization": f"Bearer {TOKEN}"} | headers
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("POST" if content else "GET", path, content or None, given)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def everything(connection: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


class Drip(threading.Thread):
    """Connections to a server, on each of which a text comes at once, and then a byte every 20 ms."""

    def __init__(self, server: Served, text: bytes, byte: bytes = b"x", count: int = 1) -> None:
        super().__init__(daemon=True)
        self.text, self.byte, self.stopped = text, byte, threading.Event()
        self.open = [connect(server) for _ in range(count)]
        self.all = list(self.open)
        for connection in self.open:
            connection.sendall(text)
        self.start()

    def run(self) -> None:
        for _ in range(BYTES):
            if self.stopped.wait(0.02) or not self.open:
                return
            for connection in list(self.open):
                try:
                    connection.send(self.byte)
                except OSError:
                    self.open.remove(connection)

    def close(self) -> None:
        self.stopped.set()
        self.join(timeout=60)
        for connection in self.all:
            connection.close()


@pytest.fixture
def drip() -> Iterator[Callable[..., Drip]]:
    with ExitStack() as made:

        def make(*words: Any, **more: Any) -> Drip:
            found = Drip(*words, **more)
            made.callback(found.close)
            return found

        yield make


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for the next step of another thread, which sends no signal."""
    gone = threading.Event()
    for _ in range(30_000):
        if condition():
            return
        gone.wait(0.002)
    raise AssertionError("it did not happen")


# -- drips ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "byte"),
    [(b"", b"G"), (b"POST /score HTTP/1.1\r\nX-Slow: ", b"x"), (b"GET /info HTTP/1.1\r\n", b"x: y\r\n")],
    ids=["a first line", "a header", "headers"],
)
def test_a_head_that_drips_has_a_deadline(served, drip, monkeypatch, text: bytes, byte: bytes):
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.5)
    # Otherwise the last of these would be closed because its head is too long.
    monkeypatch.setattr(server_module, "HEAD_BYTES", 1 << 20)
    attack = drip(served(token=TOKEN), text, byte, count=3)
    assert [everything(connection) for connection in attack.all] == [b""] * 3
    assert attack.is_alive() or not attack.open


@pytest.mark.parametrize(
    ("changes", "byte"),
    [({"BODY_SECONDS": 0.5}, b"x"), ({"READ_SECONDS": 0.5, "LEAST_RATE": 1}, b"x" * 100)],
    ids=["too slow", "too long"],
)
def test_a_body_that_drips_has_a_deadline(served, drip, monkeypatch, changes: dict[str, float], byte: bytes):
    for name, value in changes.items():
        monkeypatch.setattr(server_module, name, value)
    server = served(token=TOKEN, waiting=0)
    attack = drip(server, head(10_000_000), byte)
    assert b" 408 " in everything(attack.all[0])[:20]
    assert ask(server, body(server))[0] == 200


def test_a_body_that_comes_steadily_may_take_longer(served, monkeypatch):
    """The deadline moves with what has arrived: 80 bytes a second are enough where 10 are asked for."""
    monkeypatch.setattr(server_module, "BODY_SECONDS", 2.0)
    monkeypatch.setattr(server_module, "LEAST_RATE", 10)
    server, ticks = served(token=TOKEN), [0.0]
    server.server.clock = lambda: ticks[0]
    content = body(server)
    with connect(server) as raw:
        raw.sendall(head(len(content)))
        for start in range(0, len(content), 40):
            wait_until(lambda: server.service.admitted == 1)
            raw.sendall(content[start : start + 40])
            ticks[0] += 0.5
        found = everything(raw)
    assert ticks[0] > 2
    assert found.startswith(b"HTTP/1.1 200 ")


def test_who_does_not_read_the_answer_frees_its_place(served, monkeypatch):
    monkeypatch.setattr(server_module, "REPLY_SECONDS", 0.5)
    server = served("fails", token=TOKEN, waiting=0)
    # More than all buffers on the way hold.
    server.reward.function = lambda images, prompts: Scores([1.0] * len(prompts), {}, ["x" * 30_000_000] * len(prompts))
    content = body(server)
    with connect(server) as raw:
        raw.sendall(head(len(content)) + content)
        wait_until(lambda: 'requests_total{status="200"} 1' in server.service.metrics.text({}))
        wait_until(lambda: server.service.admitted == 0)
    server.reward.function = lambda images, prompts: [1.0] * len(prompts)
    assert ask(server, content)[0] == 200


def test_connections_without_a_token_do_not_keep_out_those_with_one(served, drip, monkeypatch):
    """Not even until the deadline of their heads: the oldest of them is closed for each new connection."""
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 600.0)
    server = served(token=TOKEN)
    attack = drip(server, b"POST /score HTTP/1.1\r\nX-Slow: ", count=200)
    content = body(server)
    for _ in range(10):
        assert ask(server, content)[0] == 200
    wait_until(lambda: len(attack.open) <= server_module.MOST_CONNECTIONS)
    assert len(attack.open) > server_module.MOST_CONNECTIONS - 20
    assert threading.active_count() < 250


def test_a_place_in_the_queue_is_not_given_to_newer_connections(served, drip):
    server = served("fails", token=TOKEN)
    entered, opened = threading.Event(), threading.Event()

    def waits(images: torch.Tensor, prompts: list[str]) -> list[float]:
        entered.set()
        opened.wait(60)
        return [1.0] * len(prompts)

    server.reward.function = waits
    content = body(server)
    with connect(server) as raw:
        raw.sendall(head(len(content)) + content)
        assert entered.wait(60)
        drip(server, b"GET", b"x", count=2 * server_module.MOST_CONNECTIONS)
        opened.set()
        assert everything(raw).startswith(b"HTTP/1.1 200 ")


def test_the_server_ends_while_everybody_drips(served, drip, monkeypatch):
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "READ_SECONDS", "REPLY_SECONDS", "DRAIN_SECONDS"):
        monkeypatch.setattr(server_module, name, 600.0)
    monkeypatch.setattr(server_module, "END_SECONDS", 0.5)
    server = served(token=TOKEN)
    attacks = [
        drip(server, b"POST /score HTTP/1.1\r\nX-Slow: ", count=100),
        drip(server, head(10_000_000), count=3),
        drip(server, head(10_000_000, token=None), count=3),
    ]
    wait_until(lambda: server.service.admitted == 3)
    ending = threading.Thread(target=server.close, daemon=True)
    ending.start()
    ending.join(timeout=30)
    assert not ending.is_alive()
    assert all(attack.is_alive() or not attack.open for attack in attacks)


# -- before the body is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"token": None}, 401),
        ({"token": TOKEN[:-1]}, 401),
        ({"host": "evil.example"}, 421),
        ({"length": 10**12}, 413),
    ],
)
def test_a_refusal_comes_before_a_byte_of_the_body(served, given: dict[str, Any], status: int):
    server = served(token=TOKEN)
    with connect(server) as raw:
        # With this header, a client waits for a word of the server before it sends the body.
        raw.sendall(head(given.pop("length", 1000), "Expect: 100-continue", **given))
        assert raw.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())
    assert server.server.budget.taken == 0


def test_who_waits_for_a_word_of_the_server_gets_it(served):
    server = served(token=TOKEN)
    content = body(server)
    with connect(server) as raw:
        raw.sendall(head(len(content), "Expect: 100-continue"))
        assert raw.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(content)
        assert everything(raw).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "text", [b"G" * 40_000, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 8000, b"GET / HTTP/1.1\r\nX: " * 2000]
)
def test_a_long_head_is_not_read(served, text: bytes):
    with connect(served(token=TOKEN)) as raw:
        raw.sendall(text)
        assert everything(raw).startswith(b"HTTP/1.1 431 ")


def test_announced_sizes_share_a_budget(served):
    server = served(token=TOKEN, waiting=9, limits=WireLimits(most_bytes=10 << 20), memory=20 << 20)
    with ExitStack() as stack:
        raws = [stack.enter_context(connect(server)) for _ in range(5)]
        for raw in raws[:2]:
            raw.sendall(head(10 << 20))
        wait_until(lambda: server.server.budget.taken == 20 << 20)
        status, answer = ask(server, body(server))
        assert (status, answer["error"]) == (503, "other requests take the memory for requests; try again later")
    wait_until(lambda: server.server.budget.taken == 0)
    assert ask(server, body(server))[0] == 200


def test_what_a_request_is_unpacked_to_counts(served):
    server = served(token=TOKEN, limits=WireLimits(most_bytes=1 << 20), memory=2 << 20)
    side = 256
    for encoding in wire.ENCODINGS:
        # 786432 bytes once unpacked; twice as many are refused, however small their files are.
        samples = torch.zeros(1, 3, side, side)
        assert ask(server, body(server, encoding, samples=samples, prompts=["p"]))[0] == 200
        samples = torch.zeros(2, 3, side, side)
        status, answer = ask(server, body(server, encoding, samples=samples))
        assert (status in (400, 413), "fewer" in answer["error"]) == (True, True)
    # Each of these is 3 bytes on the way, and an object of 64 bytes or more once it is read.
    status, answer = ask(server, body(server, columns={"deep": [[[]] * 20_000] * 2}))
    assert (status, "--memory-mb" in answer["error"]) == (413, True)
    assert server.server.budget.taken == 0


def test_a_budget_gives_back_what_was_taken():
    budget = Budget(100)
    with budget.share() as take, budget.share() as other:
        take(60)
        other(40)
        with pytest.raises(NoMemory):
            take(1)
        with pytest.raises(TooLarge):
            take(41)
        assert budget.taken == 100
    assert budget.taken == 0


# -- names and tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/score", "/info", "/metrics", "/health"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "localhost.evil.example", "1.2.3.4", ""])
def test_a_page_that_rebinds_its_name_reaches_nothing(served, path: str, host: str):
    server = served()
    status, answer = ask(server, body(server) if path == "/score" else b"", path, Host=host)
    assert status == 421
    assert "--host-name" in answer["error"]
    assert server.service.metrics.text({}).count("calls_total 0") == 0


@pytest.mark.parametrize("lines", [[], ["Host: localhost", "Host: evil.example"]])
def test_there_is_one_host(served, lines: list[str]):
    for version in ("1.0", "1.1"):
        with connect(served()) as raw:
            raw.sendall("\r\n".join([f"GET /info HTTP/{version}", *lines, "", ""]).encode())
            assert everything(raw).startswith(b"HTTP/1.1 400 ")


def test_names_of_a_server():
    local = HostNames("127.0.0.1", ["gpu-2.lab.", "[fe80::1]"])
    for name in ("localhost", "LOCALHOST:1", "127.0.0.1:8765", "127.9.9.9", "[::1]:80", "gpu-2.LAB:80", "[fe80::1]"):
        assert local.match(name), name
    for name in (
        "", ":80", "gpu-2", "192.168.1.5", "me@localhost", "localhost@evil.example", "localhost/x", "localhost:x",
        "localhost:0", "localhost:99999", "local host", "[::1", "localhost#", "localhost?", "127.0.0.1.evil.example",
    ):  # fmt: skip
        assert not local.match(name), name
    wide = HostNames("0.0.0.0")
    for name in ("localhost", "192.168.1.5:8765", "[2001:db8::1]:8765", socket.gethostname(), "127.0.0.1"):
        assert wide.match(name), name
    for name in ("evil.example", "192.168.1.5.evil.example", "0x7f.1"):
        assert not wide.match(name), name
    assert HostNames("gpu-2.lab").match("GPU-2.lab:8765")
    for name in ("http://gpu-2", "gpu-2:80", "", "a b"):
        with pytest.raises(ValueError, match="give one without http:// and port"):
            HostNames("127.0.0.1", [name])


def test_a_token_beyond_this_machine_is_long(plugins: str, monkeypatch: pytest.MonkeyPatch):
    check_host("127.0.0.1", "x")
    check_host("0.0.0.0", "x" * 16)
    monkeypatch.setenv("SHORT", "x" * 15)
    with pytest.raises(ValueError, match=r"the token has 15 characters: give it 16 or more.*openssl rand"):
        serve(f"{plugins}:surely_not_loaded", host="0.0.0.0", token_env="SHORT")


def test_too_little_memory_is_said_before_the_reward_is_loaded(plugins: str):
    with pytest.raises(ValueError, match=r"--memory-mb 100 is too little for requests of 512 MB.*--memory-mb 1024"):
        serve(f"{plugins}:surely_not_loaded", memory=100 << 20)


# -- encryption -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, str]:
    files = {"certificate": CERTIFICATE, "key": KEY, "encrypted": ENCRYPTED_KEY, "nothing": "nothing"}
    for name, text in files.items():
        (tmp_path / f"{name}.pem").write_text(text)
    return {name: str(tmp_path / f"{name}.pem") for name in files}


def test_a_client_verifies_the_certificate(served, pem: dict[str, str]):
    server = served(encryption=server_context(pem["certificate"], pem["key"]))
    for host in ("localhost", "127.0.0.1"):
        away = Remote(f"https://{host}:{server.port}", ca_file=pem["certificate"])
        assert away(images=images(), prompts=["p"] * 2).values.tolist() == images().flatten(1).mean(1).tolist()
        away.close()
    # The same certificate is not trusted unless it is named, and is not for this address.
    other = served(encryption=server_context(pem["certificate"], pem["key"]), host="127.0.0.2")
    for url, ca_file, hint in (
        (f"https://localhost:{server.port}", None, "name its PEM file as ca_file"),
        (other.url, pem["certificate"], "write a name that the certificate has in url"),
    ):
        with pytest.raises(ValueError, match=f"the certificate was not accepted.*; .*{hint}"):
            Remote(url, ca_file=ca_file, patience=1)
    with pytest.raises(ValueError, match=r"remote: http://.*; if the server is encrypted, write https:// in url"):
        Remote(f"http://localhost:{server.port}", patience=1)
    with pytest.raises(ValueError, match=r"no encrypted connection: .*; .* write http:// in url"):
        Remote(served().url.replace("http:", "https:"), patience=1)
    assert server.url == f"https://127.0.0.1:{server.port}"


def test_handshakes_that_drip_have_a_deadline(served, drip, monkeypatch, pem: dict[str, str]):
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.5)
    attack = drip(served(encryption=server_context(pem["certificate"], pem["key"])), HANDSHAKE, b"\0", count=3)
    assert [everything(connection) for connection in attack.all] == [b""] * 3
    assert attack.is_alive() or not attack.open


def test_handshakes_that_drip_keep_nobody_out(served, drip, monkeypatch, pem: dict[str, str]):
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 600.0)
    server = served(encryption=server_context(pem["certificate"], pem["key"]))
    attack = drip(server, HANDSHAKE, b"\0", count=150)
    away = Remote(f"https://localhost:{server.port}", ca_file=pem["certificate"])
    assert away(images=images(), prompts=["p"] * 2).values.shape == (2,)
    away.close()
    assert attack.open


def test_who_hangs_up_an_encrypted_connection_is_not_scored(served, pem: dict[str, str]):
    server = served("fails", encryption=server_context(pem["certificate"], pem["key"]), waiting=2)
    entered, opened, seen = threading.Event(), threading.Event(), []

    def waits(images: torch.Tensor, prompts: list[str]) -> list[float]:
        seen.append(prompts[0])
        entered.set()
        opened.wait(60)
        return [1.0] * len(prompts)

    server.reward.function = waits
    context = ssl.create_default_context(cafile=pem["certificate"])

    def send(prompt: str) -> ssl.SSLSocket:
        content = body(server, prompts=[prompt] * 2)
        raw = context.wrap_socket(connect(server), server_hostname="localhost")
        raw.sendall(head(len(content)) + content)
        return raw

    first = send("first")
    assert entered.wait(60)
    gone = send("gone")
    wait_until(lambda: server.service._jobs.qsize() == 1)
    gone.close()
    last = send("last")
    wait_until(lambda: server.service._jobs.qsize() == 2)
    opened.set()
    for raw in (first, last):
        assert everything(raw).startswith(b"HTTP/1.1 200 ")
        raw.close()
    assert seen == ["first", "last"]


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("certificate", None, "give both --certificate FILE and --key FILE"),
        (None, "key", "give both --certificate FILE and --key FILE"),
        ("certificate", "/none.pem", "--key: there is no file '/none.pem'"),
        ("/none.pem", "key", "--certificate: there is no file '/none.pem'"),
        ("nothing", "key", "cannot be used together"),
        ("certificate", "nothing", "cannot be used together"),
        ("certificate", "encrypted", "has a password; write the key without it"),
    ],
)
def test_certificates_that_cannot_be_used(plugins, pem, certificate, key, message):
    with pytest.raises(ValueError, match=message):
        serve(f"{plugins}:surely_not_loaded", certificate=pem.get(certificate, certificate), key=pem.get(key, key))


def test_remote_names_the_option_for_an_unknown_host(served):
    server = served()
    server.server.names.match = lambda header: False
    with pytest.raises(ValueError, match="--host-name"):
        Remote(server.url, patience=1)
