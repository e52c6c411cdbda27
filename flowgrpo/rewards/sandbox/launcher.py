"""The process that starts boxes. It builds the walls that all boxes share once, and forks a box in milliseconds.

The reward starts the launcher without site-packages and with an environment of its own, and sends it a socket for each
box. The launcher forks a supervisor for each box. The supervisor reads what the box should do, forks the box, and kills
it when the time is over, when the reward closes the socket, or when the launcher ends. Launcher and supervisors never
run code that a model wrote. The tests go to the supervisor of the judge only, so they are not in the memory that the
process of a completion starts with.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

from . import kernel
from .judging import run_tests
from .solution import run_program, serve

LAUNCHER_FILES, BOX_FILES = 1024, 64
MOST_PROCESSES = 128
FOLDER_MB = 16
JUDGE_BYTES = 1 << 30
Box = Callable[[], None]


def main(inlet: int, absent: list[str]) -> None:
    """Start boxes until the socket `inlet` closes.

    Args:
        inlet: descriptor of a socket. The first message out says which walls stand. Each message in is one byte with
            descriptors: the socket to the reward, and for tests also the socket between completion and judge.
        absent: walls to leave out; for tests.
    """
    os.umask(0o022)
    most = min(LAUNCHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folders = kernel.system_folders()
    walls = {wall: "it was switched off" if wall in absent else _tried(wall) for wall in kernel.WALLS}
    if not walls["namespaces"]:
        kernel.enter_namespaces()
        # The launcher becomes the first process of a namespace: when it ends, the kernel ends every box.
        kernel.own_processes()
        child = os.fork()
        if child:
            os.close(inlet)
            os.waitpid(child, 0)
            return
        kernel.die_with_parent()
    os.write(inlet, json.dumps(walls).encode() + b"\n")
    gc.freeze()
    box = _wait_for_boxes(inlet, walls, folders)
    # Only the process of a box has work here. It has left the loop, so its code cannot return into the loop.
    if box is not None:
        box()


def _wait_for_boxes(inlet: int, walls: dict[str, str], folders: list[str]) -> Box | None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    stream = socket.socket(fileno=inlet)
    while True:
        message, passed, _, _ = socket.recv_fds(stream, 1, 2)
        if not message:
            return None
        if not os.fork():
            stream.close()
            kernel.die_with_parent()
            return _supervise(passed[0], passed[1:], walls, folders)
        for number in passed:
            os.close(number)


def _supervise(control: int, channel: list[int], walls: dict[str, str], folders: list[str]) -> Box | None:
    """Fork a box, wait for its end, and report how it ended. Returns only in the process of the box."""
    request = json.loads(_read_message(control))
    nothing = os.open("/dev/null", os.O_RDWR)
    given, output, notes = (os.memfd_create(name) for name in ("input", "output", "notes"))
    os.write(given, request.pop("input", "").encode(errors="replace"))
    os.lseek(given, 0, os.SEEK_SET)
    awake, wake = os.pipe()
    ready, tell = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if not walls["namespaces"]:
        kernel.own_processes()
    child = os.fork()
    if not child:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Standard error is 2, what the role needs is 3, and the pipe that says that the walls stand is 4.
        if request["role"] == "program":
            _place(given, output, nothing, notes, tell)
        else:
            _place(nothing, nothing, nothing, channel[0], tell, *([output] if request["role"] == "judge" else []))
        return lambda: _work(request, walls, folders)
    for number in (*channel, tell):
        os.close(number)
    able, _, _ = select.select([control, awake], [], [], request["seconds"])
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    problem = os.read(ready, 1000).decode()
    reply = {"late": not able, "code": os.waitstatus_to_exitcode(status), "output": _content(output)}
    reply |= {"notes": _content(notes), "problem": "" if problem == "+" or awake not in able else problem or "it died"}
    _tell(control, json.dumps(reply).encode())
    os._exit(0)


def _work(request: dict[str, Any], walls: dict[str, str], folders: list[str]) -> None:
    role, code = request["role"], request["work"]
    try:
        _enclose(request, walls, folders)
        os.write(4, b"+")
    except BaseException as error:
        os.write(4, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)
    os.close(4)
    if role == "program":
        run_program(code, 3)
    elif role == "solution":
        serve(code, socket.socket(fileno=3))
    else:
        run_tests(code, socket.socket(fileno=3), 5)
        os._exit(0)


def _enclose(request: dict[str, Any], walls: dict[str, str], folders: list[str]) -> None:
    """Raise the walls around this process. The order matters: a wall may forbid what another one needs."""
    spaces = not walls["namespaces"]
    own = os.geteuid() == 0 or kernel.counts_by_namespace()
    memory = JUDGE_BYTES if request["role"] == "judge" else request["memory"]
    # Many kernels share the processors out by sessions, so many processes of a box cannot starve its supervisor.
    os.setsid()
    if spaces:
        kernel.own_folder(FOLDER_MB)
    kernel.drop_rights(nobody=spaces)
    kernel.limit(request["seconds"], memory, request["file_size"], BOX_FILES, MOST_PROCESSES if spaces and own else 0)
    kernel.die_with_parent()
    if not walls["landlock"]:
        kernel.close_files(folders, [kernel.WORK] if spaces else [])
    if not walls["seccomp"]:
        kernel.filter_calls()


def _tried(wall: str) -> str:
    """Raise a wall in a child process, and look whether it holds. Returns why it does not, or an empty text."""
    inlet, outlet = os.pipe()
    child = os.fork()
    if not child:
        try:
            why = _trial(wall)
        except BaseException as error:
            why = f"{error}"
        os.write(outlet, why.encode()[:1000])
        os._exit(0)
    os.close(outlet)
    with os.fdopen(inlet, "rb") as file:
        why = file.read().decode()
    os.waitpid(child, 0)
    return why


def _trial(wall: str) -> str:
    if wall == "namespaces":
        kernel.enter_namespaces()
        kernel.own_processes()
        child = os.fork()
        if not child:
            kernel.own_folder(FOLDER_MB)
            os._exit(sorted(os.listdir(kernel.WORK)) != [] or os.getpid() != 1 or os.path.exists("/proc/self"))
        return "its folder or its processes are not its own" if os.waitpid(child, 0)[1] else ""
    if wall == "landlock":
        kernel.drop_rights(nobody=False)
        kernel.close_files(["/dev/null"], [])
        return "" if _refuses(lambda: os.listdir("/")) else "a closed folder can still be read"
    kernel.filter_calls()
    held = _refuses(os.fork) and _refuses(lambda: socket.socket(socket.AF_INET))
    return "" if held else "a forbidden call is still possible"


def _refuses(action: Callable[[], Any]) -> bool:
    try:
        action()
    except PermissionError:
        return True
    return False


def _place(*numbers: int) -> None:
    """Give descriptors the numbers 0, 1, 2 and so on, and close all others."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, LAUNCHER_FILES // 2) for number in numbers]
    for place, number in enumerate(high):
        os.dup2(number, place)
    os.closerange(len(numbers), LAUNCHER_FILES)


def _content(number: int) -> str:
    # This is at most the largest file that the box may write.
    return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")


def _read_message(control: int) -> bytes:
    (length,) = struct.unpack("<I", _read(control, 4))
    return _read(control, length)


def _read(control: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = os.read(control, length - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def _tell(control: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(control, data) :]
    except OSError:
        # The reward has closed the socket, because it does not need this box any more.
        pass
