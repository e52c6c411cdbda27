"""Reading of untrusted files, which a crash may have cut short: JSON lines, and the paths of images in them."""

import re
from collections.abc import Collection, Iterator
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
