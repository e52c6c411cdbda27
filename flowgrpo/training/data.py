"""Prompt files, and the order in which a run takes prompts from them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..configs.layers import prompt_file_note
from ..configs.prompt_source import HUB, PromptSource, prompt_source
from ..configs.sections import PROMPT, WORLDS
from ..pipelines.arguments import PICTURES
from ..pipelines.pictures import Picture
from ..text.picture_marks import without_marks
from .prompts.data_sets import OpenedSet, open_folder
from .prompts.hub_sets import open_hub
from .prompts.prompt_files import file_entries
from .prompts.prompt_rows import GivenImage, PromptRow, answered, row_of, stored_rows
from .prompts.stored_pictures import stored_pictures
from .prompts.stored_table import StoredColumns, StoredTable, parquet_table

IMAGE = "image"
TARGET = "target_image"
"""The column of pictures that rewards compare samples with."""
INDEX = "index.jsonl"
"""The list of the samples of a run, which gets further lines while the run goes on."""
_START = "the folder of the prompt file"
_ID_LIKE = re.compile(r"[\w-]+/[\w-]+")
EMBEDDED = {world: f"flowgrpo.worlds.{world}" for world in WORLDS}


class MissingPrompts(ValueError):
    """The prompt file does not exist."""


def read_prompts(source: str, fetch: bool = True) -> list[PromptRow]:
    """Read prompts: a prompt file, or a data set of the library `datasets`.

    The formats of a prompt file are:

    - `.txt`: each line is a prompt;
    - `.jsonl`: each line is an object;
    - `.json`: a list of objects or texts;
    - `.csv` and `.tsv`: a table with a header;
    - `.parquet`: a table, if pyarrow is installed.

    A data set is a folder that `save_to_disk` has written, a folder like a repository of the hub, or `hub:OWNER/NAME`.
    After a `?`, the source may say more, see `configs.prompt_source`. The embedded sets are `train`, `heldout`, `test`
    and `pairs` of `scenes` and `arithmetic`, such as `scenes:train`; `pairs` are given samples. `scenes` also has
    `style` and `style_heldout`, whose column `detailed` says more than the prompt.

    All formats but `.txt` need a column `prompt`, or the column that the source names. Without it, one of `OTHER_NAMES`
    is the prompt, or else the messages with which the conversations `chosen` and `rejected` begin. Capitals do not
    matter. The rewards get the other columns by name. A prompt may be a conversation, a list of objects with `role` and
    `content`. Of tables and data sets, columns that a run cannot keep are left out: see `left_out`.

    Args:
        source: the source.
        fetch: whether a data set of the hub may be downloaded.

    Raises:
        NotFetched: the data set is not on this machine, and `fetch` is off.
        ValueError: a file is missing or empty, its ending is unknown, a line cannot be read or has no prompt, or a line
            has several of the other names and no `prompt`. The message names file and line, or the entry of a list.
    """
    named = prompt_source(source)
    if named.hub:
        found = open_hub(named, fetch)
    elif (path := prompt_path(source)).is_dir():
        found = open_folder(path, named)
    else:
        _refuse_words_of_sets(named)
        growing = path.name == INDEX
        rows = parquet_table([path]) if path.suffix.lower() == ".parquet" else file_entries(path, growing=growing)
        found = OpenedSet(rows, range(len(rows)))
    if isinstance(found.rows, StoredTable):
        return stored_rows(found.rows, found.chosen, named)
    entries = found.rows[found.chosen.start : found.chosen.stop]
    return _with_same_columns(
        [row_of(place, index, entry, named.column) for index, (place, entry) in enumerate(entries)]
    )


def _with_same_columns(rows: list[PromptRow]) -> list[PromptRow]:
    """The prompts with the columns of all of them, None where a line of a file lacks a column, as in a table.

    An iteration, or a process, may have only prompts that lack a column which a reward takes.
    """
    names = column_names(rows)
    empty = dict.fromkeys(names)
    return [row if len(row.columns) == len(names) else row.with_columns({**empty, **row.columns}) for row in rows]


def _refuse_words_of_sets(source: PromptSource) -> None:
    for word in ("split", "config", "revision"):
        if getattr(source, word) is not None:
            raise ValueError(f"{source}: {source.path} is a file, and {word} belongs to data sets; leave it out")


def prompt_path(source: str) -> Path:
    """The file or folder behind a source; raises ValueError if there is none."""
    named = prompt_source(source)
    world, colon, name = named.path.partition(":")
    if colon and world in EMBEDDED:
        home = Path(str(resources.files(EMBEDDED[world])))
        # Pairs are folders as `flowgrpo pairs` writes them.
        places = (home / "data" / f"{name}.jsonl", home / name / "metadata.jsonl", home / name / "data.jsonl")
        if (found := next((place for place in places if place.is_file()), None)) is None:
            raise ValueError(f"no embedded prompt set {source!r}; write {world}:train, {world}:heldout or {world}:test")
        return found
    if not named.path:
        raise ValueError(
            "the path of the prompt file is empty; name a file (in a recipe: data.train, data.heldout, data.test)"
        )
    path = Path(named.path)
    if named.hub or path.is_dir() or path.is_file():
        return path
    note = prompt_file_note(named.path)
    what = f"it should hold {note}; give the path of your file with data.train and data.heldout"
    hub = f"; for a data set of the hub write {HUB}{source}" if _ID_LIKE.fullmatch(named.path) else ""
    what = what if note else f"name a file that exists (in a recipe: data.train, data.heldout, data.test){hub}"
    raise MissingPrompts(f"no prompt file {named.path!r} (in {Path.cwd()}); {what}")


def with_pictures(rows: Sequence[PromptRow], source: str) -> list[PromptRow]:
    """The prompts with the pictures of their column `image`, or of the column that the source names.

    In the place of a column NAME there may be a column NAME_file_name. The column holds a path or a list of paths, or
    the pictures of a data set, which are written to files. The pictures condition the pipeline. Paths start at the
    folder of the prompt file, or of the data set. In the column `image` of the result, which rewards get, paths start
    at the working directory. Prompts without such a column are returned unchanged.

    Raises:
        ValueError: a picture is missing or cannot be read, some prompts have pictures and others have none, or there is
            no column of the name that the source gives. The message names file and line.
    """
    named = prompt_source(source)
    if any(row.pictures is not None for row in rows):
        return list(rows)
    key, stored = _picture_column(rows, named.image or IMAGE), rows[0].columns if rows else None
    if isinstance(stored, StoredColumns) and key in stored.table.pictures:
        return [_pictured(row, pictures) for row, pictures in zip(rows, _files_in(rows, source, key, lists=True))]
    if named.image is not None and not any(key in row.columns for row in rows):
        there = stored.table.pictures if isinstance(stored, StoredColumns) else ()
        listed = f"; its columns of pictures are {', '.join(there)}" if there else ""
        raise ValueError(f"{source}: there is no column {key!r:.80}{listed}")
    if not any(row.columns.get(key) for row in rows):
        return list(rows)
    return [_pictured(row, pictures) for row, pictures in zip(rows, _files_in(rows, source, key, lists=True))]


def have_pictures(rows: Sequence[PromptRow], source: str) -> bool:
    """Whether `with_pictures` gives pictures to the prompts of a source; none of them is looked for."""
    key, stored = _picture_column(rows, prompt_source(source).image or IMAGE), rows[0].columns if rows else None
    if isinstance(stored, StoredColumns) and key in stored.table.pictures:
        return True
    return any(row.pictures is not None or row.columns.get(key) for row in rows)


def with_conditions(
    rows: Sequence[PromptRow], source: str, names: Sequence[str], stored: Sequence[PromptRow] | None = None
) -> list[PromptRow]:
    """The prompts with the pictures of the columns `names` that there are, such as `mask_image`.

    A column holds one path for each prompt, or the pictures of a data set. In the place of a column NAME there may be a
    column NAME_file_name. Paths start where the paths of `with_pictures` start. Prompts that have the pictures already
    are returned unchanged.

    Args:
        rows: the prompts.
        source: their file or data set.
        names: the columns.
        stored: the same prompts before `with_pictures`, after which their columns are no longer those of a data set.

    Raises:
        ValueError: a picture is missing or cannot be read, or some prompts have a picture and others have none. The
            message names file and line.
    """
    found, read = list(rows), rows if stored is None else stored
    first = read[0].columns if read else None
    tables = first.table.pictures if isinstance(first, StoredColumns) else ()
    for name in names:
        if any(name in row.conditions for row in rows):
            continue
        key = _picture_column(read, name)
        if key in tables or any(row.columns.get(key) for row in read):
            paths = _files_in(read, source, key)
            found = [_conditioned(row, name, path) for row, path in zip(found, paths)]
    return found


def with_targets(rows: Sequence[PromptRow], source: str, stored: Sequence[PromptRow] | None = None) -> list[PromptRow]:
    """The prompts with the pictures of their column `target_image`, if there is one; rewards compare samples with them.

    The column holds one path for each prompt, or the pictures of a data set, as for `with_conditions`. In the column
    `target_image` of the result, which rewards get, paths start at the working directory.

    Args:
        rows: the prompts.
        source: their file or data set.
        stored: see `with_conditions`.

    Raises:
        ValueError: a picture is missing or cannot be read, or some prompts have a picture and others have none. The
            message names file and line.
    """
    if any(row.target is not None for row in rows):
        return list(rows)
    read = rows if stored is None else stored
    key, first = _picture_column(read, TARGET), read[0].columns if read else None
    in_table = isinstance(first, StoredColumns) and key in first.table.pictures
    if not in_table and not any(row.columns.get(key) for row in read):
        return list(rows)
    found = []
    for row, path in zip(rows, _files_in(read, source, key)):
        picture = _single(row, TARGET, path)
        found.append(replace(row.with_columns({TARGET: str(path)}), target=picture))
    return found


def _conditioned(row: PromptRow, name: str, path: Path | list[Path]) -> PromptRow:
    picture = _single(row, name, path)
    return replace(row.with_columns({name: str(path)}), conditions={**row.conditions, name: picture})


def _single(row: PromptRow, name: str, path: Path | list[Path]) -> Picture:
    if isinstance(path, list):
        raise ValueError(f"{row.place}: `{name}` is a list of {len(path)} pictures; write the path of one picture")
    picture = Picture(path, row.place, _START)
    _ = picture.size  # raises for a missing file, before anything is loaded
    return picture


OF_PLAN = "write the columns that hold the images of a prompt, the best image first, as sampler.plan.columns"


def with_given(rows: Sequence[PromptRow], source: str, columns: Sequence[str], mend: str = OF_PLAN) -> list[PromptRow]:
    """The prompts with the images that stand in the place of samples.

    A pipeline is never shown an image that it is to learn, also if it takes pictures from a column of this name. So
    such a column is taken away.

    Args:
        rows: the prompts.
        source: their file or data set.
        columns: the columns that hold the images, one image each, the best first. In the place of a column NAME there
            may be a column NAME_file_name. A column NAME_frames says how many frames of a video stand side by side in
            the image.
        mend: what to do if a column is not there.

    Raises:
        ValueError: a column is not there, a picture is missing or cannot be read, or a number of frames does not
            divide its width. The message names file and line.
    """
    found, names = [], names_with_pictures(rows)
    for column in columns:
        if (key := _picture_column(rows, column)) not in names:
            raise ValueError(
                f"{source}: there is no column {column!r:.80} of images (it has "
                f"{', '.join(sorted(names))[:200] or 'no column but the prompt'}); {mend}"
            )
        found.append([_alone(row, column, path) for row, path in zip(rows, _files_in(rows, source, key))])
    made = [replace(row, given=pictures) for row, pictures in zip(rows, zip(*found))]
    taken = {name for column in columns if column in PICTURES for name in (column, f"{column}_file_name")}
    if not taken:
        return made
    return [replace(row, columns={k: v for k, v in row.columns.items() if k not in taken}) for row in made]


def names_with_pictures(rows: Sequence[PromptRow]) -> set[str]:
    """The names of all columns, those with the pictures of a data set included."""
    stored = rows[0].columns if rows else None
    return {*column_names(rows), *(stored.table.pictures if isinstance(stored, StoredColumns) else ())}


def _picture_column(rows: Sequence[PromptRow], name: str) -> str:
    """The column of pictures: NAME, or else NAME_file_name, as `datasets` names the paths of an image folder."""
    names, other = names_with_pictures(rows), f"{name}_file_name"
    return other if name not in names and other in names else name


def _alone(row: PromptRow, column: str, path: Path | list[Path]) -> GivenImage:
    if isinstance(path, list):
        raise ValueError(
            f"{row.place}: `{column}` is a list of {len(path)} pictures; write each into a column of its own"
        )
    picture, frames = Picture(path, row.place, _START), row.columns.get(f"{column}_frames")
    width, _ = picture.size  # raises for a missing file, before anything is loaded
    if frames is not None and (type(frames) is not int or frames < 1 or width % frames):
        raise ValueError(
            f"{row.place}: `{column}_frames` is {frames!r:.80}, and the picture is {width} pixels wide; write how many "
            "frames of equal width stand side by side in it"
        )
    return GivenImage(picture, frames or 1)


def _files_in(rows: Sequence[PromptRow], source: str, key: str, lists: bool = False) -> Iterable[Path | list[Path]]:
    """The files with the pictures of a column; pictures of a data set are written to files.

    `lists` says whether a prompt may have several, for the message about a path that is none.
    """
    folder, stored = _picture_folder(prompt_source(source), source), rows[0].columns if rows else None
    if isinstance(stored, StoredColumns) and key in stored.table.pictures:
        return stored_pictures(stored.table, key, [_row_number(row) for row in rows], folder)
    return (_paths_of(row, key, folder, lists) for row in rows)


def _row_number(row: PromptRow) -> int:
    assert isinstance(row.columns, StoredColumns)
    return row.columns.row


def _picture_folder(named: PromptSource, source: str) -> Path | None:
    """The folder at which paths of pictures start; None for a data set of the hub, whose other files are not here."""
    path = prompt_path(source)
    return None if named.hub else path if path.is_dir() else path.parent


def _paths_of(row: PromptRow, key: str, folder: Path | None, lists: bool) -> Path | list[Path]:
    """The path or the paths in the column of pictures of a prompt."""
    given = row.columns.get(key)
    listed: list[Any] = given if isinstance(given, list) else [given]
    if not listed or not all(isinstance(path, str) and path for path in listed):
        raise ValueError(
            f"{row.place}: `{key}` is {given!r}; write the path of a picture{', or a list of paths,' if lists else ''} "
            "for every prompt"
        )
    if folder is None:
        raise ValueError(
            f"{row.place}: `{key}` names the file {listed[0]!r:.80}, and only the prompts of a data set of the hub are "
            "downloaded; download the whole data set, and name its folder"
        )
    paths = [folder / path for path in listed]
    return paths if isinstance(given, list) else paths[0]


def _pictured(row: PromptRow, given: Path | list[Path]) -> PromptRow:
    found = tuple(Picture(path, row.place, _START) for path in (given if isinstance(given, list) else [given]))
    for picture in found:
        _ = picture.size  # raises for a missing file, before anything is loaded
    if isinstance(given, list):
        return replace(row.with_columns({IMAGE: [str(path) for path in given]}), pictures=found)
    return replace(row.with_columns({IMAGE: str(given)}), pictures=found[0])


def templated(row: PromptRow, template: str, **fields: str) -> PromptRow:
    """A prompt within a template; in a conversation, the message that is answered is put into the template.

    Args:
        row: the prompt. If it shows pictures, they are where the template has the prompt for the first time.
        template: a text with `{prompt}`.
        fields: further fields of the template, and their texts.
    """
    later, times = row.text if row.pictures is None else without_marks(row.text), 0

    def value(match: re.Match[str]) -> str:
        nonlocal times
        if match[0] != PROMPT:
            return fields[match[1]]
        times += 1
        return row.text if times == 1 else later

    # One pass, so braces in the texts themselves stay as they are.
    return worded(row, re.sub(rf"\{{({'|'.join([PROMPT[1:-1], *fields])})\}}", value, template))


def fields_of(template: str) -> list[str]:
    """What a template has in braces besides the prompt, each name once."""
    return [name for name in dict.fromkeys(re.findall(r"\{(\w+)\}", template)) if name != PROMPT[1:-1]]


def told_in(row: PromptRow, name: str, key: str) -> str:
    """The text in a column of a prompt, which a template names; empty if the prompt has nothing there.

    Args:
        row: the prompt.
        name: of the column.
        key: what has the template, for messages.

    Raises:
        ValueError: the prompt has no such column, or what is there is no text.
    """
    place = row.place or f"{row.text!r:.80}"
    if name not in row.columns:
        raise ValueError(
            f"{key}: the template has {{{name}}}, and {place} has no column {name!r}; add the column, or name another"
        )
    value = row.columns[name]
    if isinstance(value, (list, dict)):
        raise ValueError(
            f"{key}: the template has {{{name}}}, and column {name!r} of {place} is {value!r:.80}; write the text that "
            "the teacher reads"
        )
    return "" if value is None else str(value)


def worded(row: PromptRow, text: str) -> PromptRow:
    """A prompt with another text; in a conversation, it is the text of the message that is answered."""
    if row.messages is None:
        return replace(row, text=text)
    place = answered(row.messages)
    told = {**row.messages[place], "content": text}
    return replace(row, text=text, messages=(*row.messages[:place], told, *row.messages[place + 1 :]))


def column_names(rows: Sequence[PromptRow], given: Collection[str] = ()) -> list[str]:
    """The names of the columns of several prompts, and of the columns that the run gives.

    Raises:
        ValueError: the run gives `parts`, and the prompts have a column `parts`.
    """
    kinds = dict.fromkeys(tuple(row.columns) for row in rows)
    found = list(dict.fromkeys(name for kind in kinds for name in kind))
    if "parts" in found and "parts" in given:
        raise ValueError(
            "the prompts have a column 'parts', and rewards get the parts of completions by that name; rename the "
            "column, or leave out `parts` of the recipe"
        )
    return [*found, *(name for name in given if name not in found)]


def values_of(rows: Sequence[PromptRow], name: str) -> list[Any]:
    """The values of a column, None where a prompt lacks it. A column of a table is read as a whole."""
    first = rows[0].columns if rows else None
    if not isinstance(first, StoredColumns) or 10 * len(rows) < len(first.table):
        return [row.columns.get(name) for row in rows]
    if name not in first:
        return [None] * len(rows)
    values = first.table.values(name)
    return [values[_row_number(row)] for row in rows]


def columns_of(
    rows: Sequence[PromptRow],
    given: Mapping[str, list[Any]] | None = None,
    among: Sequence[PromptRow] | None = None,
) -> dict[str, list[Any]]:
    """The columns of several prompts, `None` where a prompt lacks a column, and the columns that the run gives.

    A column of the prompts replaces a column of the run with the same name. With `among`, also the columns that only
    these prompts have.

    Raises:
        ValueError: see `column_names`.
    """
    values, own = dict(given or {}), column_names(rows if among is None else among)
    names = column_names(rows if among is None else among, values)
    return {name: values[name] if name not in own else [row.columns.get(name) for row in rows] for name in names}


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
    """Training prompts as a stream, held-out prompts, and the images that penalty `data` learns beside a rollout."""

    train: PromptStream
    heldout: list[PromptRow]
    beside: list[PromptRow] = field(default_factory=list)
