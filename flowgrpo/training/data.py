"""Prompt files, and the order in which a run takes prompts from them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..configs.layers import prompt_file_note
from ..configs.sections import PROMPT, WORLDS
from ..pipelines.pictures import Picture
from ..text.cutting import Parts
from .folder.json_lines import parse_strict, unwritable

IMAGE = "image"
# DrawBench and UniGenBench have these names for the column `prompt`.
OTHER_NAMES = ("prompts", "prompt_en", "prompt_zh")
EMBEDDED = {world: f"flowgrpo.worlds.{world}" for world in WORLDS}


@dataclass(frozen=True)
class PromptRow:
    """One prompt with the other columns of its file.

    Attributes:
        id: the position of the prompt in its file, from 0.
        text: the prompt; for a conversation the content of the last message.
        columns: the other columns, by name.
        messages: a conversation, for language models; None for a plain prompt.
        pictures: the pictures that condition the pipeline together with the text; see `with_pictures`.
        place: file and line of the prompt, for messages.
    """

    id: int
    text: str
    columns: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] | None = None
    pictures: Picture | tuple[Picture, ...] | None = None
    place: str = field(default="", compare=False)

    @property
    def prompt(self) -> str:
        """The prompt that a pipeline gets: the text, and the pictures if there are any. Each access reads the pictures.

        Raises:
            ValueError: a picture can no longer be read.
        """
        if self.pictures is None:
            return self.text
        from ..pipelines.capture import ConditionedPrompt

        if isinstance(self.pictures, Picture):
            return ConditionedPrompt(self.text, image=self.pictures.read())
        return ConditionedPrompt(self.text, image=[picture.read() for picture in self.pictures])


class MissingPrompts(ValueError):
    """The prompt file does not exist."""


def read_prompts(source: str) -> list[PromptRow]:
    """Read a prompt file.

    The formats are:

    - `.txt`: each line is a prompt;
    - `.jsonl`: each line is an object;
    - `.json`: a list of objects or texts;
    - `.csv` and `.tsv`: a table with a header;
    - `.parquet`: a table, if pyarrow is installed.

    All formats but `.txt` need a column `prompt`. Without it, one of `OTHER_NAMES` is the prompt. Capitals do not
    matter. The rewards get the other columns by name. A prompt may be a conversation, a list of objects with `role` and
    `content`. The embedded sets are `train`, `heldout` and `test` of `scenes` and `arithmetic`, such as `scenes:train`.

    Raises:
        ValueError: a file is missing or empty, its ending is unknown, a line cannot be read or has no prompt, or a line
            has several of the other names and no `prompt`. The message names file and line, or the entry of a list.
    """
    path = prompt_path(source)
    if path.suffix.lower() == ".parquet":
        return [_row(f"{path}, row {k}", k - 1, entry) for k, entry in enumerate(_parquet(path), 1)]
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
        entries = [(number, parse_strict(line, str(path), number)) for number, line in lines]
    elif ending == ".json":
        listed = parse_strict(text, str(path)) if lines else []
        if not isinstance(listed, list):
            raise ValueError(f"{path} holds {type(listed).__name__}; give a JSON list of prompts or objects")
        entries, unit = list(enumerate(listed, 1)), "entry"
    elif ending in (".csv", ".tsv"):
        entries = _table(path, text, "\t" if ending == ".tsv" else ",")
    else:
        raise ValueError(
            f"{path}: prompt files end in .txt, .jsonl, .json, .csv, .tsv or .parquet, not {ending or 'nothing'!r}"
        )
    if not entries:
        raise ValueError(f"{path} holds no prompt")
    return [_row(f"{path}, {unit} {number}", index, entry) for index, (number, entry) in enumerate(entries)]


def prompt_path(source: str) -> Path:
    """The file behind a source; raises ValueError if there is none."""
    world, colon, name = source.partition(":")
    if colon and world in EMBEDDED:
        path = Path(str(resources.files(EMBEDDED[world]) / "data" / f"{name}.jsonl"))
        if not path.is_file():
            raise ValueError(f"no embedded prompt set {source!r}; write {world}:train, {world}:heldout or {world}:test")
        return path
    path = Path(source)
    if not source:
        raise ValueError("the path of the prompt file is empty; check data.train, data.heldout and data.test")
    if path.is_dir():
        raise ValueError(f"the prompt file {source!r} is a folder; name a file in it")
    if not path.is_file():
        note = prompt_file_note(source)
        what = f"it should hold {note}; give the path of your file with data.train and data.heldout"
        what = what if note else "check data.train, data.heldout and data.test"
        raise MissingPrompts(f"no prompt file {source!r} (in {Path.cwd()}); {what}")
    return path


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


def _row(place: str, index: int, entry: Any) -> PromptRow:
    if isinstance(entry, str):
        entry = {"prompt": entry}
    known = {key.lower(): key for key in entry if isinstance(key, str)} if isinstance(entry, dict) else {}
    both = [key for key in entry if isinstance(key, str) and key.lower() == "prompt"] if known else []
    if len(both) > 1:
        raise ValueError(f"{place}: {' and '.join(both)} could be the prompt; keep one of them")
    others = [known[name] for name in OTHER_NAMES if name in known]
    key = known.get("prompt", others[0] if others else None)
    if "prompt" not in known and len(others) > 1:
        raise ValueError(f"{place}: {' and '.join(others)} could be the prompt; name one of them `prompt`")
    if key is None:
        have = ", ".join(map(str, entry)) if isinstance(entry, dict) else type(entry).__name__
        raise ValueError(f"{place}: no `prompt` (it has {have[:200] or 'nothing'})")
    for name, value in entry.items():
        if (why := unwritable(value)) is not None:
            raise ValueError(f"{place}: `{name}` cannot be kept: {why}; write it as text or a number")
    columns = {k: v for k, v in entry.items() if k not in (key, None)}
    if isinstance(entry[key], list):
        messages = _conversation(place, entry[key])
        return PromptRow(index, messages[-1]["content"], columns, messages, place=place)
    if not isinstance(entry[key], str) or not entry[key].strip():
        raise ValueError(f"{place}: `prompt` is {entry[key]!r:.80}; write the words of a prompt")
    if "\0" in entry[key]:
        raise ValueError(f"{place}: `prompt` holds a NUL character; is the file a text?")
    return PromptRow(index, entry[key], columns, place=place)


def _conversation(place: str, messages: list[Any]) -> tuple[dict[str, str], ...]:
    for message in messages:
        keys = ("role", "content")
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) and message[k] for k in keys):
            raise ValueError(
                f"{place}: `prompt` has the message {message!r:.200}; give objects with `role` and `content`"
            )
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{place}: the conversation in `prompt` must end with a message to be answered, with `role` and `content`"
        )
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError:
        raise ValueError(
            f"{path}: reading parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no prompt")
    # Tables of floats have NaN for a missing value.
    return [{name: None if value != value else value for name, value in row.items()} for row in rows]


def with_pictures(rows: Sequence[PromptRow], source: str) -> list[PromptRow]:
    """The prompts with the pictures of their column `image`, which holds a path or a list of paths.

    The pictures condition the pipeline. Paths in the file start at the folder of the prompt file. In the columns of the
    result, which rewards get, paths start at the working directory. Prompts without such a column are returned
    unchanged.

    Raises:
        ValueError: a picture is missing or cannot be read, or some prompts have pictures and others have none. The
            message names file and line.
    """
    if all(row.pictures is not None or not row.columns.get(IMAGE) for row in rows):
        return list(rows)
    folder = prompt_path(source).parent
    return [_with_picture(row, folder) for row in rows]


def _with_picture(row: PromptRow, folder: Path) -> PromptRow:
    given = row.columns.get(IMAGE)
    listed: list[Any] = given if isinstance(given, list) else [given]
    if not listed or not all(isinstance(path, str) and path for path in listed):
        raise ValueError(
            f"{row.place}: `{IMAGE}` is {given!r}; write the path of a picture, or a list of paths, for every prompt"
        )
    found = tuple(Picture(folder / path, row.place) for path in listed)
    for picture in found:
        _ = picture.size  # raises for a missing file, before anything is loaded
    paths = [str(picture.path) for picture in found]
    if isinstance(given, list):
        return replace(row, columns={**row.columns, IMAGE: paths}, pictures=found)
    return replace(row, columns={**row.columns, IMAGE: paths[0]}, pictures=found[0])


def templated(row: PromptRow, template: str) -> PromptRow:
    """A prompt within a template; in a conversation, the last message is put into the template."""
    text = template.replace(PROMPT, row.text)
    if row.messages is None:
        return replace(row, text=text)
    *before, last = row.messages
    return replace(row, text=text, messages=(*before, {**last, "content": text}))


def columns_of(rows: Sequence[PromptRow], parts: Parts | None = None) -> dict[str, list[Any]]:
    """The columns of several prompts, `None` where a prompt lacks a column; with `parts`, also a column of their texts.

    Raises:
        ValueError: `parts` are given, and the prompts have a column `parts`.
    """
    names = dict.fromkeys(name for row in rows for name in row.columns)
    found = {name: [row.columns.get(name) for row in rows] for name in names}
    if parts is None:
        return found
    if "parts" in found:
        raise ValueError(
            "the prompts have a column 'parts', and rewards get the parts of completions by that name; rename the "
            "column, or leave out `parts` of the recipe"
        )
    return {**found, "parts": parts.texts}


class PromptStream:
    """Prompts in an endless shuffled order that depends on the seed alone. Every pass has each prompt once."""

    def __init__(self, rows: Sequence[PromptRow], seed: int) -> None:
        self.rows, self.seed = list(rows), seed

    def take(self, first: int, count: int) -> list[PromptRow]:
        """The `count` prompts of the stream from number `first` on."""
        chosen: list[PromptRow] = []
        while len(chosen) < count:
            epoch, place = divmod(first + len(chosen), len(self.rows))
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
            chosen += [self.rows[int(k)] for k in order[place : place + count - len(chosen)]]
        return chosen


@dataclass
class Data:
    """Training prompts as a stream, and held-out prompts."""

    train: PromptStream
    heldout: list[PromptRow]
