"""The lock of a run folder: only one process writes in it. The lock ends with its process, whatever ends the process.

The lock is a POSIX record lock (`fcntl`). Network file systems pass such a lock on to their server, and child processes
do not inherit it. The process must not open the file again, because closing the file would release the lock.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from ...intake.json_text import parse_json

NAME = ".flowgrpo-lock"
_TAKEN = {errno.EACCES, errno.EAGAIN}
_held: dict[tuple[int, Path], list[int]] = {}
"""Process and folder -> the handle of the lock, and the number of claims."""


def claim(folder: Path) -> str | None:
    """Make this process the only writer of a folder, until it ends or has released all its claims.

    Returns:
        None; if the file system has no locks, a sentence that says so.

    Raises:
        ValueError: another process writes in the folder; the message says which.
    """
    key = os.getpid(), folder.resolve()
    if key in _held:
        _held[key][1] += 1
        return None
    handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(handle)
    except OSError as error:
        taken = error.errno in _TAKEN
        note = os.pread(handle, 4096, 0).decode("utf-8", "replace") if taken else ""
        os.close(handle)
        if taken:
            raise ValueError(f"{folder} is being written by {_holder(note)}; wait for its end, or end it") from None
        return (
            f"the file system of {folder} has no locks ({error.strerror}): nothing keeps a second process from writing "
            "in it; start only one"
        )
    since = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    text = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n"
    # On a full disk the run still starts; it fails when it has something to write.
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
    _held[key] = [handle, 1]
    return None


def release(folder: Path) -> None:
    """Release one claim. After the last claim is released, another process may write in the folder."""
    key = os.getpid(), folder.resolve()
    if key not in _held:
        return
    _held[key][1] -= 1
    if _held[key][1] == 0:
        os.close(_held.pop(key)[0])


def held(folder: Path) -> bool:
    """Whether another process holds the lock of a folder; False if the file system has no locks.

    The lock is taken for a moment, and a run that starts in this moment would be refused. So ask only about a run that
    seems to have ended. A process that holds the lock itself must not ask, because it would lose the lock.
    """
    try:
        handle = os.open(folder / NAME, os.O_RDWR)
    except OSError:
        return False
    try:
        _lock(handle)
    except OSError as error:
        return error.errno in _TAKEN
    finally:
        os.close(handle)
    return False


def _lock(handle: int) -> None:
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOTSUP, "this system has none") from None
    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(note: str) -> str:
    try:
        found = parse_json(note)
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
