"""Writing of files: a file appears whole under its final name or not at all, and errors name the file."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a disk without room: full, beyond the quota, beyond the largest size of a file."""


class NoRoom(OSError):
    """There is no room for a file.

    Attributes:
        needed: bytes that must be free, if that is known.
    """

    needed: int | None = None


@contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """A context in which every failure to write is an OSError that names a file: its own file, or else `path`.

    The writers of safetensors and torch raise errors of their own, and Python's errors for an open file name no file. A
    ValueError passes: it has a message of ours.

    Args:
        path: what is written.
        needed: bytes of everything that is written together with it, for the error.

    Raises:
        NoRoom: the disk or the quota is full, or the largest size of a file is reached.
    """
    try:
        yield
    except (NoRoom, ValueError):
        raise
    except Exception as error:
        number = _number_in(error)
        named = error.filename if isinstance(error, OSError) else None
        if number in FULL:
            full = NoRoom(number, os.strerror(number), str(named or path))
            full.needed = needed
            raise full from error
        # The copy of a folder names the files that it could not copy.
        if number is None or named is not None or isinstance(error, shutil.Error):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _number_in(error: BaseException | None) -> int | None:
    """The error number behind an exception of a library; None if it is not about writing."""
    while error is not None:
        if isinstance(error, shutil.Error):
            # The copy of a folder collects the errors of its files as text.
            inner = re.search(r"\[Errno (\d+)\]", str(error))
            return int(inner[1]) if inner else None
        if isinstance(error, OSError):
            return error.errno
        # safetensors is written in Rust; its versions before 0.6 have the second form.
        if (found := re.search(r"\(os error (\d+)\)|\bOs \{ code: (\d+)", str(error))) is not None:
            return int(found[1] or found[2])
        # torch does not pass the number on, and a full disk is the usual reason.
        if re.search("PytorchStreamWriter failed|file write failed|iostream error", str(error)):
            return errno.ENOSPC
        # torch fails a second time while it handles the first error.
        error = error.__cause__ or error.__context__
    return None


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary sibling, flush it to disk and rename it to `path`.

    Raises:
        OSError: the file could not be written; it is named as `path`, the temporary sibling is removed, and `path` is
            unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            write(temporary)
            sync(temporary)
            os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # Nobody has asked for the temporary file.
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append a line of JSON for each record and flush the lines to disk; a failure may leave an incomplete line."""
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    with writing(path), path.open("a", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def sync(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, where the system can do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def explained(error: OSError) -> str:
    """The message that a command prints for an OSError: first the file, and for a full disk how much room is needed."""
    if error.filename is None or error.strerror is None:
        return str(error)
    if error.errno not in FULL:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    path, needed = Path(os.fsdecode(error.filename)), getattr(error, "needed", None)
    wanted = f"; {_size(needed)} are needed" if needed else ""
    if error.errno == errno.EFBIG:
        return f"{path} is larger than the file system or the limit of this process (ulimit -f) allows{wanted}"
    if error.errno == errno.EDQUOT:
        return f"the quota leaves no room to write {path}{wanted}; make room"
    place = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    free = shutil.disk_usage(place).free
    return f"the disk is full: no room to write {path}{wanted}, {_size(free)} are free in {place}; make room"


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
