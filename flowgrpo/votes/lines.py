"""Files that may have been cut short by a crash or written by a stranger: JSON lines, and paths of images in them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif"})

# A backslash is a path separator to browsers; control characters and lone surrogates are never in our names.
_BAD_IN_PATH = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")


def iterate_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The lines of a JSON-lines file that are not blank, by their numbers from 1: objects, None for what is none."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield number, record if isinstance(record, dict) else None


def read_jsonl(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """The objects of a JSON-lines file with their line numbers, and how many lines were unreadable.

    A crash leaves a last line cut short, and a resumed run goes on appending after it, so an unreadable
    line may stand anywhere; it costs only itself.
    """
    lines = list(iterate_jsonl(path))
    records = [(number, record) for number, record in lines if record is not None]
    return records, len(lines) - len(records)


def check_image(image: object, samples: Path, where: str) -> str:
    """Return `image` if it names an image file inside `samples` (links resolved), links followed.

    Raises:
        ValueError: it is not text, leads outside, or is not an image by its name.
    """
    fix = "It must be the path of an image, relative to the samples folder and inside it."
    if not isinstance(image, str) or not image or _BAD_IN_PATH.search(image):
        raise ValueError(f"{where}: `image` is {image!r}. {fix}")
    absolute = image.startswith("/") or re.match(r"[A-Za-z]:", image)
    if absolute or ".." in image.split("/") or not (samples / image).resolve().is_relative_to(samples):
        raise ValueError(f"{where}: `image` {image!r} leads outside {samples}. {fix}")
    if Path(image).suffix.lower() not in IMAGE_SUFFIXES:
        raise ValueError(f"{where}: `image` {image!r} is not one of {', '.join(sorted(IMAGE_SUFFIXES))}.")
    return image
