"""What this user of this machine has trusted: a file that is only ever appended to, and that no run folder can reach.

The file is `trusted.jsonl` in `$XDG_STATE_HOME/flowgrpo`, by default `~/.local/state/flowgrpo`. A line holds the digest
of one thing, what it is in words, and the time. To forget a thing, take its line out. If that folder cannot be written,
a folder of the user in the machine's temporary folder takes its place. It counts only if no other user can write in it.

A run folder holds no mark of its own. A mark would travel with the folder: whoever gets a run from you could send it
back with another recipe and your mark.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .json_text import lines_of, parse_json

NAME = "trusted.jsonl"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_here: set[str] = set()
"""Digests of what this process has trusted; they count even if the file cannot be written."""


def digest(thing: Any) -> str:
    """The digest of something that JSON can write, without regard to the order of keys."""
    return hashlib.sha256(json.dumps(thing, sort_keys=True, default=str).encode()).hexdigest()


def ledger_files() -> list[Path]:
    """Paths at which the file may be, the preferred one first."""
    base = os.environ.get("XDG_STATE_HOME", "")
    found = []
    if not os.path.isabs(base):
        with suppress(RuntimeError):
            base = str(Path.home() / ".local" / "state")
    if os.path.isabs(base):
        found.append(Path(base) / "flowgrpo" / NAME)
    return [*found, Path(tempfile.gettempdir()) / f"flowgrpo-{_user()}" / NAME]


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def trusted(found: str) -> bool:
    """Whether this process, or an earlier process of this user, has trusted the thing with this digest."""
    return found in _here or found in _stored()


def trust(things: Mapping[str, str]) -> str | None:
    """Remember things, digest -> what it is in words. Several processes may do so at once.

    Returns:
        None; if the preferred file cannot be written, a sentence that says so and what happens instead.
    """
    _here.update(things)
    stored = _stored()
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    new = [{"digest": key, "what": what, "time": now} for key, what in things.items() if key not in stored]
    if not new:
        return None
    lines = "".join(json.dumps(line) + "\n" for line in new).encode()
    first, *others = ledger_files()
    try:
        _append(first, lines)
    except OSError as error:
        failed = f"{first} cannot be written ({error.strerror})"
    else:
        return None
    for file in others:
        with suppress(OSError):
            _append(file, lines)
            return f"{failed}, so {file} remembers this run until the machine clears its temporary files"
    return (
        f"{failed}, so this machine does not remember the run, and later commands will ask for --trust; set "
        "XDG_STATE_HOME to a folder of yours that can be written"
    )


def _append(file: Path, lines: bytes) -> None:
    """Append lines in one write; processes take turns, and a line that a crash cut short is ended first."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _mine(file.parent):
        raise OSError(errno.EPERM, "its folder belongs to another user, or others may write in it", str(file))
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o600)
    try:
        with _locked(handle):
            size = os.fstat(handle).st_size
            cut = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, b"\n" * cut + lines)
    finally:
        os.close(handle)


@contextmanager
def _locked(handle: int) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # a system without such locks, where the single write must do
        yield
        return
    # Not every network file system has locks.
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)
    yield


def _mine(folder: Path) -> bool:
    """Whether a folder is the user's own, no link, and no other user may write in it."""
    if not hasattr(os, "geteuid"):
        return True
    info = os.lstat(folder)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == _user() and not info.st_mode & 0o022


def _stored() -> set[str]:
    """The digests in the files. A file that cannot be read, or that others may have written, counts for nothing."""
    found: set[str] = set()
    for file in ledger_files():
        with suppress(OSError, ValueError):
            if _mine(file.parent) and not file.is_symlink():
                found.update(digest for line in lines_of(file) if (digest := _digest_in(line)) is not None)
    return found


def _digest_in(line: str) -> str | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found.get("digest") if isinstance(found, dict) and isinstance(found.get("digest"), str) else None
