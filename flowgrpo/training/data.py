"""Prompt files, and the order in which a run takes prompts from them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PromptRow:
    """One prompt with the other columns of its file.

    Attributes:
        id: its position in the file, from 0.
        text: the prompt.
        columns: everything else, by name.
    """

    id: int
    text: str
    columns: dict[str, Any] = field(default_factory=dict)


def read_prompts(source: str) -> list[PromptRow]:
    """Read a prompt file.

    `.txt`: a prompt a line. `.jsonl`: an object a line, `.json`: a list of objects or texts, `.csv` and `.tsv`: a
    header; these need a column `prompt`, and others go to the rewards by name. `scenes:train` and
    `scenes:heldout` are the embedded sets.

    Raises:
        ValueError: a missing or empty file, an unknown ending, an unreadable line or one without a prompt; the
            message names file and line (of a `.json` list, the entry).
    """
    path = prompt_path(source)
    try:
        # Spreadsheets begin their UTF-8 with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    ending, unit = path.suffix.lower(), "line"
    # Not splitlines(), which also cuts at characters that prompts may hold, such as U+2028.
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if ending == ".txt":
        entries: list[tuple[int, Any]] = [*lines]
    elif ending == ".jsonl":
        entries = [(number, _json(path, number, line)) for number, line in lines]
    elif ending == ".json":
        listed = _json(path, 1, text)
        if not isinstance(listed, list):
            raise ValueError(f"{path} holds {type(listed).__name__}; give a JSON list of prompts or objects")
        entries, unit = list(enumerate(listed, 1)), "entry"
    elif ending in (".csv", ".tsv"):
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if ending == ".tsv" else ",")
        entries = [(reader.line_num, dict(row)) for row in reader]
    else:
        raise ValueError(f"{path}: prompt files end in .txt, .jsonl, .json, .csv or .tsv, not {ending or 'nothing'!r}")
    if not entries:
        raise ValueError(f"{path} holds no prompt")
    return [_row(f"{path}, {unit} {number}", index, entry) for index, (number, entry) in enumerate(entries)]


def prompt_path(source: str) -> Path:
    """The file behind a source; raises ValueError if there is none."""
    if source.startswith("scenes:"):
        name = source.removeprefix("scenes:")
        path = Path(str(resources.files("flowgrpo.scenes") / "data" / f"{name}.jsonl"))
        if not path.is_file():
            raise ValueError(f"no embedded prompt set {source!r}; write scenes:train or scenes:heldout")
        return path
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"no prompt file {source!r} (in {Path.cwd()}); check data.train and data.heldout")
    return path


def _json(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise ValueError(f"{path}, line {line}: not JSON ({error.msg} at column {error.colno})") from None


def _row(place: str, index: int, entry: Any) -> PromptRow:
    if isinstance(entry, str):
        entry = {"prompt": entry}
    known = {key.lower(): key for key in entry if isinstance(key, str)} if isinstance(entry, dict) else {}
    key = known.get("prompt")
    if key is None:
        have = ", ".join(map(str, entry)) if isinstance(entry, dict) else type(entry).__name__
        raise ValueError(f"{place}: no `prompt` (it has {have or 'nothing'})")
    if not isinstance(entry[key], str) or not entry[key].strip():
        raise ValueError(f"{place}: `prompt` is {entry[key]!r}; write the words of a prompt")
    return PromptRow(index, entry[key], {k: v for k, v in entry.items() if k not in (key, None)})


def columns_of(rows: Sequence[PromptRow]) -> dict[str, list[Any]]:
    """The columns of several prompts, `None` where one lacks a column."""
    names = dict.fromkeys(name for row in rows for name in row.columns)
    return {name: [row.columns.get(name) for row in rows] for name in names}


class PromptStream:
    """Prompts in an endless shuffled order that depends on the seed alone: every pass holds each prompt once."""

    def __init__(self, rows: Sequence[PromptRow], seed: int) -> None:
        self.rows, self.seed = list(rows), seed

    def take(self, first: int, count: int) -> list[PromptRow]:
        """Prompts number `first` to `first + count` of the stream."""
        chosen = []
        for position in range(first, first + count):
            epoch, place = divmod(position, len(self.rows))
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
            chosen.append(self.rows[int(order[place])])
        return chosen
