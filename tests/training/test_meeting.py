"""How processes of a run meet, and what they say when one of them never comes, or is gone."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowgrpo.training.distributed import processes
from flowgrpo.training.distributed.processes import ended_together

pytestmark = pytest.mark.slow

MEETING = """
from flowgrpo.training.distributed import processes
from flowgrpo.training.stopping import Stop
processes.NOTICE_SECONDS = 1.0
with Stop().listening():
    print("listening", flush=True)
    try:
        processes.launched()
    except ValueError as error:
        raise SystemExit(str(error))
"""


def meeting(port: int) -> subprocess.Popen[str]:
    """A process with number 0 of two, whose fellow never comes."""
    names = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", MEETING], env={**os.environ, **names}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def test_a_process_that_waits_for_the_others_says_so_and_ends_at_a_signal() -> None:
    port = free_port()
    process = meeting(port)
    assert process.stderr is not None
    try:
        said = ""
        while "waits for 2 processes" not in said:
            said = process.stderr.readline()
            assert said, "it ended"
        assert f"process 0 waits for 2 processes to meet at 127.0.0.1:{port}; is each of them started?" in said
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == -signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = meeting(port)
        try:
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 1
    assert f"port {port} is taken, perhaps by another run on this machine" in said
    assert "Traceback" not in said


class Store:
    """A store without a note, of a process that is alone."""

    def clone(self) -> "Store":
        return self

    def check(self, keys: list[str]) -> bool:
        return False

    def wait(self, keys: list[str], timeout: object) -> None:
        raise RuntimeError("timed out")


@pytest.mark.parametrize("lost", [True, False])
def test_a_process_that_lost_another_one_says_so(lost: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class State:
        num_processes, process_index = 2, 0

    told: list[object] = []
    monkeypatch.setattr(processes, "launched", State)
    monkeypatch.setattr(processes.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes.torch.distributed.distributed_c10d, "_get_default_store", Store)
    monkeypatch.setattr(processes, "_tell", lambda *words, **more: told.append(words))
    message = "gloo: Read error [127.0.0.1]: Connection closed by peer\nmore" if lost else "another error"
    kind: type[Exception] = ValueError if lost else RuntimeError
    began = time.monotonic()
    words = r"is gone: it was killed.*Connection closed by peer\)" if lost else "another"
    with pytest.raises(kind, match=words), ended_together():
        raise RuntimeError(message)
    # Nobody else is told of a process that they have lost as well.
    assert bool(told) != lost
    assert time.monotonic() - began < 30
