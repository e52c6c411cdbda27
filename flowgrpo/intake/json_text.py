"""Reading JSON that a stranger may have written: every failure is a ValueError, and no file takes all memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEEPEST = 100
"""Largest number of objects and lists within each other. A file of ours has fewer than ten."""
LONGEST_LINE = 2**24
"""Largest number of characters of a line of a `.jsonl` file."""
LARGEST_FILE = 2**32
"""Largest number of bytes of a `.jsonl` file."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not JSON, a number is too long, or the value is too deep to be walked by recursion. If
            the text is not JSON, the error is a json.JSONDecodeError.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from None
    opened = (text.count(b"[") + text.count(b"{")) if isinstance(text, bytes) else (text.count("[") + text.count("{"))
    if opened > DEEPEST and _height(value) > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return value


def _height(value: Any) -> int:
    """Number of levels of a value, at most one more than `DEEPEST`."""
    level, height = [value], 0
    while height <= DEEPEST:
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inner(outer)]
        if not level:
            return height
        height += 1
    return height


def _inner(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a text file with their ends. A line that is too long is empty, without an end.

    Raises:
        ValueError: the file is too large.
    """
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise ValueError(
            f"{path} has {size / 2**30:,.0f} GiB, and a file of a run has {LARGEST_FILE / 2**30:,.0f} GiB at most; "
            "look where it comes from, and move it away"
        )
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(LONGEST_LINE):
            cut = len(line) == LONGEST_LINE and not line.endswith("\n")
            while cut and (rest := file.readline(LONGEST_LINE)) and not rest.endswith("\n"):
                pass
            yield "" if cut else line
