"""Files of a gallery. Each is written whole before it gets its final name. Only our own are replaced or removed."""

import errno
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..intake.json_text import parse_json

MARKER = ".flowgrpo-gallery.json"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TEMPORARY = re.compile(r"\..+\.(?P<host>[^/]*)-(?P<process>\d+)-\d+\.tmp")


def previous_files(out: Path) -> set[str]:
    """Names of the files that the last build left in `out`.

    Raises:
        ValueError: the folder was not written by the gallery.
    """
    # A build that was killed before it listed its files leaves only temporary files.
    if not out.exists() or (out.is_dir() and all(_TEMPORARY.fullmatch(path.name) for path in out.iterdir())):
        return set()
    try:
        names = list(parse_json((out / MARKER).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{out} exists and was not written by the gallery (it has no readable {MARKER}). "
            "Name a new or an empty folder."
        ) from error
    root = out.resolve()
    ours = {name for name in names if isinstance(name, str) and (out / name).resolve().is_relative_to(root)}
    return {name for name in ours if not (out / name).is_dir()}


def write_marker(out: Path, names: set[str]) -> None:
    """List the files that are ours."""
    write_bytes(out / MARKER, (json.dumps({"files": sorted(names)}, indent=1) + "\n").encode())


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary name in the same folder, and rename what it made to `path`.

    Raises:
        OSError: the file could not be written; the error has a file name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}.{owner}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        # An error while writing to an open file has no file name.
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    finally:
        # What is left of a failure, which may be the reason of the error that is raised.
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def remove_stale(out: Path) -> None:
    """Remove the temporary files of builds in `out` that were killed on this machine."""
    for path in out.rglob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match and match["host"] == socket.gethostname() and not _alive(int(match["process"])):
            path.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    """Whether another process with this number may be running."""
    if process == os.getpid():
        return False
    if os.name == "nt":  # there a signal of 0 would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, unless it has this content already; then the file keeps its time."""
    if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
        return
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def write_new(path: Path, write: Callable[[Path], object]) -> Path:
    """Write an export.

    Raises:
        ValueError: the path exists already; the file may be the user's own.
    """
    if path.exists():
        raise ValueError(f"{path} exists; name a new file, or remove it first")
    write_whole(path, write)
    return path


def copy_by_content(image: Path, sha256: str, folder: Path) -> str:
    """Copy an image into `images/` of a folder, unless a copy is there; returns its path within the folder.

    The name comes from the content, so an image of many rows is copied once, and no name hints at what was chosen.
    """
    name = f"images/{sha256[:32]}{image.suffix.lower()}"
    (folder / "images").mkdir(exist_ok=True)
    if not (folder / name).exists():
        shutil.copyfile(image, folder / name)
    return name


def copy_file(source: Path, path: Path) -> None:
    """Copy an image, unless the last build left a copy of equal size and time."""
    kept, fresh = path.stat() if path.is_file() else None, source.stat()
    if kept and (kept.st_size, kept.st_mtime_ns) == (fresh.st_size, fresh.st_mtime_ns):
        return
    write_whole(path, lambda temporary: shutil.copy2(source, temporary))
