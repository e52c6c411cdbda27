"""JSON lines: reading of untrusted files, which a crash may have cut short, with paths of images; and appending."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..intake.json_text import lines_of, parse_json

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif"})

# Browsers treat a backslash as a path separator. Names of our files never have control characters or lone surrogates.
_BAD_IN_PATH = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")


def iterate_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield number (from 1) and object of each non-blank line of a JSON-lines file; None if it is not an object."""
    for number, line in enumerate(lines_of(path), start=1):
        if line.isspace():
            continue
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        yield number, record if isinstance(record, dict) else None


def read_jsonl(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """Return the objects in a JSON-lines file with their line numbers, and the number of unreadable lines.

    A crash may leave an incomplete last line, and a resumed run appends lines after it. So an unreadable line may be
    anywhere in the file; only this line is skipped.
    """
    lines = list(iterate_jsonl(path))
    records = [(number, record) for number, record in lines if record is not None]
    return records, len(lines) - len(records)


def append_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append objects to a JSON-lines file; they are on the disk when this function returns.

    Processes that write to the same file take turns. The folder of the file is made if it is not there.

    Raises:
        OSError: the lines could not be written completely. An incomplete line is ignored on reading.
    """
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file, _locked(file.fileno()):
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            # If a crash has left an incomplete last line, the new lines must not be joined to it.
            lines = lines if file.read(1) == b"\n" else b"\n" + lines
        if file.write(lines) != len(lines):
            raise OSError(f"only a part could be written to {path}; is the disk full?")
        os.fsync(file.fileno())


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # this system has no such locks; a single write at the end of the file is the best alternative
        yield
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def check_image(
    image: object,
    samples: Path,
    where: str,
    field: str = "image",
    what: str = "an image",
    suffixes: Collection[str] = IMAGE_SUFFIXES,
) -> str:
    """Return `image` if it is the path of an image file inside the folder `samples`, after links are resolved.

    Args:
        image: what the record has.
        samples: the folder, with links resolved.
        where: file and line, for the error message.
        field: the name in the record.
        what: what the file is, for the error message.
        suffixes: the endings that such a file may have.

    Raises:
        ValueError: `image` is not a text, leads outside the folder, or does not have the suffix of an image.
    """
    fix = f"It must be the path of {what}, relative to the samples folder and inside it."
    if not isinstance(image, str) or not image or _BAD_IN_PATH.search(image):
        raise ValueError(f"{where}: `{field}` is {image!r}. {fix}")
    absolute = image.startswith("/") or re.match(r"[A-Za-z]:", image)
    if absolute or ".." in image.split("/") or not (samples / image).resolve().is_relative_to(samples):
        raise ValueError(f"{where}: `{field}` {image!r} leads outside {samples}. {fix}")
    if Path(image).suffix.lower() not in suffixes:
        raise ValueError(f"{where}: `{field}` {image!r} is not one of {', '.join(sorted(suffixes))}.")
    return image
