"""The memory and the end of a server in a process of its own, while it is attacked."""

import http.client
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.rewards.inputs import Inputs
from flowgrpo.rewards.serving import wire
from flowgrpo.rewards.serving.declaration import Declaration
from tests.rewards.served import REWARDS
from tests.rewards.test_serving_wire import chunk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's figures of memory"),
]

TOKEN = "a-token-of-20-letters"
# The server may take this for all requests together, and little more.
MOST_MB, MEMORY_MB, LITTLE_MB = 64, 160, 64


class Process:
    """`flowgrpo rewards serve` with a reward that takes the mean of each image."""

    def __init__(self, plugins: Path) -> None:
        words = [
            "rewards", "serve", f"{plugins}:level", "--port", "0", "--token-env", "REWARD_TOKEN", "--waiting", "60",
            "--max-mb", str(MOST_MB), "--memory-mb", str(MEMORY_MB),
        ]  # fmt: skip
        environment = {**os.environ, "REWARD_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flowgrpo", *words], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rpartition(":")[2])
        self.fingerprint = ""
        # What the first request loads counts as the server's own.
        self.fingerprint = self.ask(self.body(4))[1]["declaration"]
        assert self.ask(self.body(4))[0] == 200
        self.began = self.megabytes()

    def body(self, side: int, encoding: str = "float32", **more: Any) -> bytes:
        given = {"samples": torch.zeros(1, 3, side, side), "prompts": ["p"], "columns": {}, "groups": None, **more}
        return wire.pack(Inputs(**given), self.fingerprint, encoding)

    def ask(self, content: bytes) -> tuple[int, dict[str, Any]]:
        """The status and the answer; of a refusal for another reward, the right fingerprint."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": wire.CONTENT_TYPE, "Authorization": f"Bearer {TOKEN}"}
        try:
            # A server that refuses a request hangs up early. The answer is there to be read.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", "/score", content, headers)
            reply = connection.getresponse()
            answer = json.loads(reply.read())
        finally:
            connection.close()
        if reply.status == 409:
            answer["declaration"] = Declaration.from_json(answer["declaration"]).fingerprint
        return reply.status, answer

    def megabytes(self) -> float:
        """The largest resident memory so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s*(\d+) kB", status)
        assert found
        return int(found[1]) / 1024

    @property
    def grown(self) -> float:
        return self.megabytes() - self.began


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    path = tmp_path_factory.mktemp("served") / "served_rewards.py"
    path.write_text(REWARDS)
    made = Process(path)
    yield made
    made.process.kill()
    made.process.wait()


def head(length: int) -> bytes:
    lines = (
        "POST /score HTTP/1.1", "Host: localhost", f"Content-Type: {wire.CONTENT_TYPE}", f"Content-Length: {length}",
        f"Authorization: Bearer {TOKEN}",
    )  # fmt: skip
    return "\r\n".join((*lines, "", "")).encode()


def connect(server: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def black(side: int) -> bytes:
    """A black PNG file, a thousandth of what it unpacks to."""
    packing, row = zlib.compressobj(9), b"\0" * (3 * side + 1)
    data = b"".join(packing.compress(row) for _ in range(side)) + packing.flush()
    about = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", about) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def picture(server: Process, file: bytes, side: int) -> bytes:
    """A request with one picture."""
    samples = {"kind": "images", "encoding": "png", "shape": [1, 3, side, side], "sizes": [len(file)]}
    text = json.dumps(
        {
            "version": 1, "serves": server.fingerprint, "prompts": ["p"], "columns": {}, "groups": None,
            "samples": samples,
        }
    ).encode()  # fmt: skip
    return b"".join([len(text).to_bytes(8, "big"), text, file])


# The tests run in this order: the largest memory so far is the server's, and the last test ends it.


def test_long_heads_take_little_memory(server: Process):
    lines = b"GET /info HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (k, b"x" * 1000) for k in range(14))
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connect(server)).sendall(lines)
        assert server.ask(server.body(4))[0] == 200
        assert server.grown < LITTLE_MB


def test_announced_bodies_take_no_memory(server: Process):
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(server)).sendall(head(MOST_MB << 20))
        # The server accepts one connection after another, so it has looked at all of these heads.
        assert server.ask(b"x" * 100)[0] == 400
    assert server.grown < LITTLE_MB


def test_a_small_picture_of_a_huge_size_is_not_unpacked(server: Process):
    side = 4096
    file = black(side)
    # Both are below 64 KB, and the picture is 192 MB when it is unpacked.
    assert len(file) < 64 << 10
    status, answer = server.ask(picture(server, file, side))
    assert (status, "too many for a limit" in answer["error"]) == (400, True)
    # A file that is larger than the request says.
    status, answer = server.ask(picture(server, file, 16))
    assert (status, "not RGB of 16×16" in answer["error"]) == (400, True)
    assert server.grown < LITTLE_MB


def test_a_text_that_unpacks_to_many_objects_is_not_unpacked(server: Process):
    deep = io.BytesIO()
    deep.write(b'{"version": 1, "columns": {"a": [')
    deep.write(b"[]," * 6_000_000)
    deep.write(b"[]]}}")
    text = deep.getvalue()
    status, answer = server.ask(len(text).to_bytes(8, "big") + text)
    assert (status, "--memory-mb" in answer["error"]) == (413, True)
    # The request itself, twice; its objects would take a gigabyte.
    assert server.grown < LITTLE_MB + 2 * len(text) / (1 << 20)


def test_fifty_clients_at_once_share_the_memory(server: Process):
    content, patience = server.body(1024, samples=torch.full((1, 3, 1024, 1024), 0.25)), threading.Event()
    found: list[list[float]] = []
    refused = [0]

    def client() -> None:
        status, answer = server.ask(content)
        while status == 503:
            refused[0] += 1
            patience.wait(0.1)
            status, answer = server.ask(content)
        found.append(answer["values"])

    threads = [threading.Thread(target=client) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0.25]] * 50
    # Without a limit, 50 requests of 12 MB would be there at a time.
    assert refused[0] > 0
    assert server.grown < MEMORY_MB + LITTLE_MB


def test_it_answers_and_ends_while_three_hundred_connections_drip(server: Process):
    with ExitStack() as stack:
        raws = [stack.enter_context(connect(server)) for _ in range(300)]
        stopped = threading.Event()

        def drip() -> None:
            for _ in range(600):
                for raw in raws:
                    with suppress(OSError):
                        raw.send(b"G")
                if stopped.wait(0.2):
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            content = server.body(64)
            for _ in range(10):
                assert server.ask(content)[0] == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=60) == 0
            assert dripping.is_alive()
        finally:
            stopped.set()
            dripping.join()
