"""The script that runs in the process of the sandbox: it sets limits, then guards, then runs the code and its tests.

It uses only the standard library, and is started without site-packages. `sandbox.py` says what the sandbox can and
cannot do.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # Python puts the folder of a script first in the path. This folder may have modules with names of the standard
    # library.
    del sys.path[0]

import json
import os
import resource
import types
from collections.abc import Callable
from typing import Any

LONGEST_MESSAGE = 200
MOST_FILES_WRITTEN = 100
# Every process writes to these files, or modules of the standard library read them.
FREE = ("/dev/null", "/dev/urandom", "/usr/share/zoneinfo")
READS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk"}
WRITES = {"os.chdir", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.utime"}
# An event loop makes a pair of sockets. Events that would connect sockets to anything else are refused.
HARMLESS = {"os.putenv", "os.unsetenv", "socket.__new__"}
REFUSED = {
    "gc.get_objects",
    "gc.get_referents",
    "gc.get_referrers",
    "pty.spawn",
    "resource.prlimit",
    "resource.setrlimit",
    "signal.pthread_kill",
    "sqlite3.connect",
    "subprocess.Popen",
    "sys._current_exceptions",
    "sys._current_frames",
    "sys.setprofile",
    "sys.settrace",
    "webbrowser.open",
}
REFUSED_PARTS = {"ctypes", "fcntl", "os", "socket", "syslog", "termios"}
# Subinterpreters would not have the audit hook. The other modules give access to the interpreter's internals.
REFUSED_MODULES = {
    "_ctypes",
    "_interpreters",
    "_posixsubprocess",
    "_testcapi",
    "_testinternalcapi",
    "_xxsubinterpreters",
    "ctypes",
}
FRAMES = {"ag_frame", "cr_frame", "gi_frame", "tb_frame"}


def plain(value: Any) -> Any:
    """Return a value of built-in types in a form that is equal, as JSON, exactly if the values are equal.

    Raises:
        TypeError: the value, or a value inside it, has another type or is not equal to itself.
    """
    if value is None:
        return ["none"]
    if isinstance(value, (bool, int)):
        return ["number", hex(value)]
    if isinstance(value, float):
        if value != value:
            raise TypeError("nan is equal to nothing")
        return ["number", hex(int(value)) if value.is_integer() else value.hex()]
    if isinstance(value, complex):
        return plain(value.real) if not value.imag else ["complex", plain(value.real), plain(value.imag)]
    if isinstance(value, str):
        return ["text", str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", [plain(inner) for inner in value]]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted(json.dumps(plain(inner)) for inner in value)]
    if isinstance(value, dict):
        return ["dict", sorted((json.dumps(plain(key)), json.dumps(plain(inner))) for key, inner in value.items())]
    raise TypeError(f"a {type(value).__name__} is not a value of a built-in type")


def main() -> None:
    """Do the job in the file with the first descriptor, and write verdicts to the file with the second descriptor."""
    job_file, verdict_file = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(job_file, "rb") as file:
        job = json.load(file)
    sys.argv[:] = ["solution.py"]
    _limit(**job["limits"])
    secret, dumps, write = job["secret"], json.dumps, os.write

    def send(**record: Any) -> None:
        write(verdict_file, dumps({**record, "secret": secret}).encode() + b"\n")

    _guard(os.getcwd(), os.path.dirname(os.__file__))
    # A program runs as __main__. Code with tests runs as a library, so that its main part does not run before the
    # tests.
    module = types.ModuleType("solution" if job["steps"] else "__main__")
    sys.modules[module.__name__] = module
    leave = os._exit
    try:
        exec(compile(job["code"], "solution.py", "exec"), module.__dict__)
    except BaseException as error:
        if isinstance(error, SystemExit) and not job["steps"]:
            raise
        send(error=_message(error))
        leave(1)
    if job["steps"]:
        _test(job["steps"], module.__dict__, send)
        send(end=True)
        leave(0)


def _test(steps: list[dict[str, Any]], names: dict[str, Any], send: Callable[..., None]) -> None:
    dumps, shown = json.dumps, plain
    for number, step in enumerate(steps):
        try:
            if step["kind"] == "value":
                send(step=number, value=dumps(shown(eval(compile(step["source"], "tests", "eval"), names))))
            else:
                exec(compile(step["source"], "tests", "exec"), names)
                send(step=number, passed=True)
        except BaseException as error:
            send(step=number, error=_message(error))


def _message(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE].removesuffix(": ")
    except BaseException:
        return "an exception that cannot be shown"


def _limit(cpu_seconds: int, memory: int, file_size: int, files: int) -> None:
    # The number of processes is not limited: this limit counts all processes of the user, and has no effect for root.
    for name, amount in (
        ("CPU", cpu_seconds),
        ("AS", memory),
        ("FSIZE", file_size),
        ("NOFILE", files),
        ("CORE", 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(kind, (amount, amount))


def _guard(folder: str, library: str) -> None:
    """Refuse from now on everything that code does not need to solve a task.

    Args:
        folder: the only folder in which files may be written.
        library: the folder of the standard library, in which files may be read.
    """
    import _posixsubprocess
    from _thread import get_ident

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("the sandbox does not start processes")

    # This module starts processes without an audit event. It is loaded and patched now, and cannot be loaded again.
    _posixsubprocess.fork_exec = refuse  # type: ignore[assignment]
    real, decode, frame, within = os.path.realpath, os.fsdecode, sys._getframe, os.path.join
    home, stock = real(folder), real(library)
    written, looking = [0], set()

    def inside(path: Any, roots: tuple[str, ...]) -> bool:
        full = real(decode(path))
        return any(full == root or full.startswith(within(root, "")) for root in roots)

    def check(path: Any, writes: bool, event: str) -> None:
        if path in (0, 1, 2):
            return
        if isinstance(path, int) or not inside(path, (home, *FREE) if writes else (home, stock, *FREE)):
            raise PermissionError(f"the sandbox does not allow {event} of {path!r:.80}")

    def by_library() -> bool:
        """Whether the event comes from a module of the standard library. This check causes an event itself."""
        me = get_ident()
        if me in looking:
            return True
        looking.add(me)
        try:
            name = frame(2).f_code.co_filename
        finally:
            looking.discard(me)
        return name.startswith(("<frozen", stock))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
            check(path, writes or bool(set(mode or "") & set("wax+")), event)
            written[0] += writes
            if written[0] > MOST_FILES_WRITTEN:
                raise PermissionError(f"the sandbox does not write more than {MOST_FILES_WRITTEN} files")
        elif event in READS or event in WRITES:
            for path in arguments:
                # Numbers are modes, times, and descriptors of folders that are already open.
                if isinstance(path, (str, bytes)):
                    check(path, event in WRITES, event)
        elif event == "import":
            if arguments[0] in REFUSED_MODULES:
                raise ImportError(f"the sandbox does not import {arguments[0]}")
        elif event == "object.__getattr__" or event.startswith("sys._getframe"):
            if (event[0] == "s" or arguments[1] in FRAMES) and not by_library():
                raise PermissionError("the sandbox does not show frames")
        elif event in REFUSED or (event not in HARMLESS and event.partition(".")[0] in REFUSED_PARTS):
            raise PermissionError(f"the sandbox does not allow {event}")

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
