"""What this user of this machine has trusted: a file that is only ever appended to, and that no run folder can reach.

The file is `trusted.jsonl` in `$XDG_STATE_HOME/flowgrpo`, by default `~/.local/state/flowgrpo`. A line holds the digest
of one thing, what it is in words, and the time. To forget a thing, take its line out.

A run folder holds no mark of its own. A mark would travel with the folder: whoever gets a run from you could send it
back with another recipe and your mark.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .json_text import lines_of, parse_json

_here: set[str] = set()
"""Digests of what this process has trusted; they count even if the file cannot be written."""


def digest(thing: Any) -> str:
    """The digest of something that JSON can write, without regard to the order of keys."""
    return hashlib.sha256(json.dumps(thing, sort_keys=True, default=str).encode()).hexdigest()


def ledger_file() -> Path | None:
    """Path of the file; None if the user has no home."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        try:
            base = str(Path.home() / ".local" / "state")
        except RuntimeError:
            return None
    return Path(base) / "flowgrpo" / "trusted.jsonl"


def trusted(found: str) -> bool:
    """Whether this process, or an earlier process of this user, has trusted the thing with this digest."""
    return found in _here or found in _stored()


def trust(things: Mapping[str, str]) -> str | None:
    """Remember things, digest -> what it is in words. Several processes may do so at once.

    Returns:
        None; if the file cannot be written, a sentence that says so. Then only this process remembers.
    """
    _here.update(things)
    file = ledger_file()
    if file is None:
        return "there is no home folder to remember this run in; set XDG_STATE_HOME to a folder of yours"
    stored = _stored()
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    new = [{"digest": key, "what": what, "time": now} for key, what in things.items() if key not in stored]
    if not new:
        return None
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _append(file, "".join(json.dumps(line) + "\n" for line in new).encode())
    except OSError as error:
        return (
            f"{file} cannot be written ({error.strerror}), so this machine does not remember the run; later commands "
            "will ask for --trust. Set XDG_STATE_HOME to a folder of yours that can be written"
        )
    return None


def _append(file: Path, lines: bytes) -> None:
    """Append lines in one write; processes take turns, and a line that a crash cut short is ended first."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
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


def _stored() -> set[str]:
    """The digests in the file; none if there is no file, or if it belongs to another user."""
    file = ledger_file()
    try:
        if file is None or (hasattr(os, "geteuid") and file.stat().st_uid != os.geteuid()):
            return set()
        return {found for line in lines_of(file) if (found := _digest_in(line))}
    except (OSError, ValueError):
        return set()


def _digest_in(line: str) -> str | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found.get("digest") if isinstance(found, dict) and isinstance(found.get("digest"), str) else None
