"""The formats of prompt files. A reader gives each entry with its place, and names file and line of a fault."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..folder.json_lines import parse_strict

Entry = tuple[str, Any]
"""The place of an entry, for messages, and the entry: a prompt, or a mapping from columns to values."""
TEXTS = (".txt", ".jsonl", ".json", ".csv", ".tsv")
"""Endings of the files that are read here. `stored_table` reads the others."""


def file_entries(path: Path, lines_too: bool = False, growing: bool = False) -> list[Entry]:
    """The entries of a prompt file, by the ending of its name.

    Args:
        path: the file.
        lines_too: whether a `.json` file may also hold an object a line, as in many data sets.
        growing: whether the file is written line by line, so that a line without its end is not there yet.

    Raises:
        ValueError: the ending is unknown, the file holds nothing, or a line cannot be read.
    """
    ending = path.suffix.lower()
    if ending not in TEXTS:
        raise ValueError(f"{path}: prompt files end in {', '.join(TEXTS)} or .parquet, not {ending or 'nothing'!r}")
    unit = "entry" if ending == ".json" and not lines_too else "line"
    found = [(f"{path}, {unit} {number}", entry) for number, entry in _text_entries(path, ending, lines_too, growing)]
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return found


def _text_entries(path: Path, ending: str, lines_too: bool, growing: bool) -> list[tuple[int, Any]]:
    """The entries of a text file, each with the number of its line, or of the entry of a JSON list."""
    try:
        # Spreadsheets begin their UTF-8 with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if growing:
        text = text[: text.rfind("\n") + 1]
    if ending in (".csv", ".tsv"):
        return _table(path, text, "\t" if ending == ".tsv" else _separator(text))
    # Not splitlines(), which also cuts at characters that prompts may hold, such as U+2028.
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if ending == ".txt":
        return [*lines]
    if ending == ".jsonl" or (lines_too and ending == ".json" and not text.lstrip().startswith("[")):
        return [(number, parse_strict(line, str(path), number)) for number, line in lines]
    listed = parse_strict(text, str(path)) if lines else []
    if not isinstance(listed, list):
        raise ValueError(f"{path} holds {type(listed).__name__}; give a JSON list of prompts or objects")
    return list(enumerate(listed, 1))


def _separator(text: str) -> str:
    """What separates the cells of a .csv: where numbers have a decimal comma, spreadsheets write `;` or a tab."""
    head = next((line for line in text.splitlines() if line.strip()), "")
    found = [mark for mark in ",;\t" if len(next(csv.reader([head], delimiter=mark))) > 1]
    return found[0] if len(found) == 1 else ","


def _table(path: Path, text: str, mark: str) -> list[tuple[int, Any]]:
    # A reader that is not strict drops quotes that do not pair, or reads the following lines into the cell.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
    found: list[tuple[int, Any]] = []
    try:
        for row in _rows(path, reader):
            found.append(row)
        return found
    except csv.Error as error:
        if mark == "\t":
            # The cells of PartiPrompts are not quoted, and some of its prompts begin with words in quotes.
            return list(_rows(path, csv.reader(io.StringIO(text, newline=""), delimiter=mark, quoting=csv.QUOTE_NONE)))
        line = found[-1][0] if found else 1
        raise ValueError(
            f"{path}, line {line + 1}: not a table ({error}); a cell that begins with a quote must end with "
            "one, and quotes within it are doubled"
        ) from None


def _rows(path: Path, reader: Any) -> Iterator[tuple[int, Any]]:
    """Rows with the number of their last line. Every row has a cell for every name of the header."""
    header: list[str] = []
    for cells in reader:
        if not cells:
            continue
        place = f"{path}, line {reader.line_num}"
        if not header:
            header = cells
            for k, name in enumerate(header):
                if not name.strip():
                    raise ValueError(f"{place}: column {k + 1} has no name; name it, or take it out")
                if name in header[:k]:
                    raise ValueError(f"{place}: the column {name!r:.80} stands twice; keep one of them")
        elif len(cells) != len(header):
            raise ValueError(
                f"{place}: the row has {len(cells)} cells and the header {len(header)}; give each column one, and put "
                "a cell that holds a separator in quotes"
            )
        else:
            yield reader.line_num, dict(zip(header, cells))
