"""Pictures that a data set holds as bytes, as files: pipelines and rewards read pictures from files.

The files are in the cache of this user, named by their content. So they are the same for every run, and a run that goes
on finds them or writes them again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...pipelines.pictures import ENDINGS
from ..folder.files import write_atomically
from .stored_table import StoredTable


def cache_folder() -> Path:
    """The folder of the pictures of data sets: below `XDG_CACHE_HOME`, by default in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "flowgrpo" / "pictures"


def stored_pictures(
    table: StoredTable, name: str, rows: Sequence[int], folder: Path | None
) -> Iterator[Path | list[Path]]:
    """The file or the files with the pictures of each row.

    Args:
        table: of the data set.
        name: the column.
        rows: numbers of the rows, ascending.
        folder: where the paths of pictures start that the table does not hold; None if there are none of these.

    Raises:
        ValueError: a row has no picture.
    """
    places, values, last = list(table.places()), table.picture_values(name), -1
    for row in rows:
        for _ in range(row - last):
            value = next(values)
        last = row
        place = places[row]
        if isinstance(value, list) and value:
            yield [_file(entry, name, place, folder) for entry in value]
        else:
            yield _file(value, name, place, folder)


def _file(value: Any, name: str, place: str, folder: Path | None) -> Path:
    held, path = (value.get("bytes"), value.get("path")) if isinstance(value, Mapping) else (value, None)
    if held is None and (not path or folder is None):
        raise ValueError(f"{place}: `{name}` holds no picture; every prompt needs one")
    if held is None:
        return folder / str(path)  # type: ignore[operator]
    digest, ending = hashlib.sha256(held).hexdigest(), Path(path or "").suffix.lower()
    file = cache_folder() / digest[:2] / f"{digest}{ending if ending in ENDINGS else '.png'}"

    def write(temporary: Path) -> None:
        temporary.write_bytes(held)

    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, write)
    return file
