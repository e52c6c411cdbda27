"""Prompts in tables of Arrow: a parquet file, or the files of a data set.

A table may have a million rows, and columns of pictures that are larger than the memory. So the columns stay in the
table, and a row reads its values when it is asked for them. Columns that a run cannot keep are not read at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Read = Callable[[Sequence[str]], Any]
"""Reads some columns of a table, as a pyarrow.Table with these columns in this order."""
Walk = Callable[[str], Iterator[Any]]
"""Reads a column piece by piece, as batches of pyarrow."""

_FEW = 64
"""Rows of a column of pictures that are in memory together."""


def arrow() -> Any:
    """The package pyarrow.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise ValueError("reading parquet needs pyarrow, which is not installed: pip install pyarrow") from None
    return pyarrow


@dataclass(frozen=True)
class FilePart:
    """A part of a table: rows of one file.

    Attributes:
        name: of the file, for messages.
        rows: number of rows.
    """

    name: str
    rows: int


class StoredTable:
    """The rows of a table.

    Args:
        schema: pyarrow.Schema of the whole table.
        read: reads columns.
        walk: reads a column that may be larger than the memory.
        parts: the parts of the table, in order.

    Attributes:
        names: columns that a run can keep: texts, numbers, and lists and structures of these.
        pictures: columns of pictures, or of other bytes.
        left_out: all other columns.

    Raises:
        ValueError: the file is damaged, or a column has a number that is not finite.
    """

    def __init__(self, schema: Any, read: Read, walk: Walk, parts: Sequence[FilePart]) -> None:
        kinds = {field.name: field.type for field in schema}
        if len(kinds) < len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise ValueError(f"{parts[0].name}: the column {twice!r:.80} stands twice; keep one of them")
        self.names = tuple(name for name, kind in kinds.items() if _keepable(kind))
        self.pictures = tuple(name for name, kind in kinds.items() if _is_picture(kind))
        self.left_out = tuple(name for name in kinds if name not in (*self.names, *self.pictures))
        self.parts, self._walk = tuple(parts), walk
        self._columns = self._sound(read)

    def __len__(self) -> int:
        return sum(part.rows for part in self.parts)

    def places(self) -> Iterator[str]:
        """The place of each row, for messages."""
        for part in self.parts:
            for number in range(1, part.rows + 1):
                yield f"{part.name}, row {number}"

    def values(self, name: str) -> list[Any]:
        """All values of a column."""
        return [_plain(value) for value in self._columns[name].to_pylist()]

    def value(self, name: str, row: int) -> Any:
        """The value of a column in a row; None where a table of floats has NaN for a missing value."""
        return _plain(self._columns[name][row].as_py())

    def picture_values(self, name: str) -> Iterator[Any]:
        """The values of a column of pictures, row by row."""
        with self._damage():
            for batch in self._walk(name):
                batch.validate(full=True)
                for value in batch.column(0):
                    yield value.as_py()

    def _sound(self, read: Read) -> dict[str, Any]:
        with self._damage():
            table = read(self.names)
            # A file may come from a stranger, and pyarrow checks nothing of a file that it maps into memory.
            table.validate(full=True)
        columns = {name: table.column(name) for name in self.names}
        for name, column in columns.items():
            if any(map(_has_infinity, column.chunks)):
                raise ValueError(
                    f"{self.parts[0].name}: a number of column {name!r:.80} is not finite; write null where there is "
                    "none"
                )
        return columns

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.parts[0].name} is damaged: {error}") from None


class StoredColumns(Mapping[str, Any]):
    """The columns of one row. A value is read from the table when it is asked for.

    Args:
        table: the table.
        row: number of the row.
        names: the columns.
    """

    __slots__ = ("names", "row", "table")

    def __init__(self, table: StoredTable, row: int, names: tuple[str, ...]) -> None:
        self.table, self.row, self.names = table, row, names

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        return self.table.value(name, self.row)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return repr(dict(self))


def parquet_table(files: Sequence[Path]) -> StoredTable:
    """The rows of parquet files, one file after the other.

    Raises:
        ValueError: a file is no parquet file, the files have different columns, or they hold nothing, or pyarrow is
            not installed.
    """
    pa = arrow()
    heads = []
    for file in files:
        try:
            heads.append(pa.parquet.read_metadata(file))
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is not a parquet file: {error}") from None
    schemas = [head.schema.to_arrow_schema() for head in heads]
    _require_one(schemas, files)

    def read(names: Sequence[str]) -> Any:
        tables = [pa.parquet.ParquetFile(file).read(columns=list(names)).select(list(names)) for file in files]
        return pa.concat_tables(tables, promote_options="permissive")

    def walk(name: str) -> Iterator[Any]:
        for file in files:
            yield from pa.parquet.ParquetFile(file).iter_batches(_FEW, columns=[name])

    parts = [FilePart(str(file), head.num_rows) for file, head in zip(files, heads)]
    return _holding(StoredTable(schemas[0], read, walk, parts))


def arrow_table(files: Sequence[Path]) -> StoredTable:
    """The rows of Arrow files, which are mapped into memory.

    Raises:
        ValueError: a file is no Arrow file, the files have different columns, or they hold nothing, or pyarrow is
            not installed.
    """
    pa = arrow()
    tables = []
    for file in files:
        try:
            mapped = pa.memory_map(str(file))
            try:
                tables.append(pa.ipc.open_stream(mapped).read_all())
            except pa.ArrowInvalid:
                tables.append(pa.ipc.open_file(mapped).read_all())
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} is not an Arrow file: {error}") from None
    _require_one([table.schema for table in tables], files)
    joined = pa.concat_tables(tables, promote_options="permissive")
    parts = [FilePart(str(file), len(table)) for file, table in zip(files, tables)]
    return whole_table(joined, parts)


def whole_table(table: Any, parts: Sequence[FilePart]) -> StoredTable:
    """The rows of a pyarrow.Table."""

    def read(names: Sequence[str]) -> Any:
        return table.select(list(names))

    def walk(name: str) -> Iterator[Any]:
        yield from table.select([name]).to_batches(_FEW)

    return _holding(StoredTable(table.schema, read, walk, parts))


def _holding(table: StoredTable) -> StoredTable:
    if not len(table):
        raise ValueError(f"{table.parts[0].name} holds no prompt")
    return table


def _require_one(schemas: Sequence[Any], files: Sequence[Path]) -> None:
    for schema, file in zip(schemas, files):
        if set(schema.names) != set(schemas[0].names):
            missing = sorted(set(schema.names) ^ set(schemas[0].names))
            raise ValueError(
                f"{file} and {files[0]} differ in the columns {', '.join(missing)[:200]}; give all files the "
                "same columns"
            )


def _keepable(kind: Any) -> bool:
    """Whether JSON can hold the values of a type."""
    types = arrow().types
    if types.is_dictionary(kind):
        return _keepable(kind.value_type)
    if types.is_struct(kind):
        return all(_keepable(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _keepable(kind.value_type)
    simple = (
        types.is_null,
        types.is_boolean,
        types.is_integer,
        types.is_floating,
        types.is_string,
        types.is_large_string,
    )
    return any(test(kind) for test in simple)


def _is_picture(kind: Any) -> bool:
    """Whether values are pictures as `datasets.Image` stores them, bytes of files, or lists of such values."""
    types = arrow().types
    if types.is_binary(kind) or types.is_large_binary(kind):
        return True
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_picture(kind.value_type)
    # Sounds are stored in the same way, and are found out when they are opened.
    return types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}


def _has_infinity(values: Any) -> bool:
    pa = arrow()
    kind = values.type
    if pa.types.is_floating(kind):
        return bool(pa.compute.any(pa.compute.is_inf(values)).as_py())
    if pa.types.is_struct(kind):
        return any(map(_has_infinity, values.flatten()))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _has_infinity(values.flatten())
    return False


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return value
