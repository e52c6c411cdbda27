"""SQL on an embedded database. The reward `sql` runs this module in a separate process, without torch."""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

# Single functions may not return longer values, if this version of Python can set the limit in sqlite.
LONGEST_VALUE = 1_000_000
INSTRUCTIONS_BETWEEN_LOOKS = 1000
GRAM = 2
_READING = re.compile(r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/)*(?:select|with|values)\b", re.IGNORECASE | re.DOTALL)
_LITERAL = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(r"'(?:[^']|'')*'|\w+|[<>!=|]{2}|[^\w\s]")
_NO_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "randomblob", "random"}
# SQLITE_RECURSIVE and SQLITE_LIMIT_LENGTH. Not every version of Python's module has names for them.
_RECURSIVE, _LENGTH = 33, 0
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, _RECURSIVE}


def judge(schema: str, reference: str, query: str, seconds: float, most_rows: int) -> dict[str, Any]:
    """Compare a query with the reference on the database that a script creates.

    Args:
        schema: a script that creates and fills the tables; it is trusted.
        reference: the right query.
        query: the query that is judged.
        seconds: how long each of the two queries may run.
        most_rows: how many rows a result may have.

    Returns:
        The parts `syntax`, `tables`, `ngram` and `execution`, see `sql.Sql`; and `note`, the error of the query.

    Raises:
        ValueError: the script or the reference fails.
    """
    connection, touched, columns, rows = _prepared(schema, reference, seconds, most_rows)
    parts: dict[str, Any] = {"syntax": 0.0, "tables": 0.0, "execution": 0.0, "note": ""}
    parts["ngram"] = _overlap(_grams(reference), _grams(query))
    try:
        own = _touched(connection, query)
        parts.update(syntax=1.0, tables=_overlap(touched, own))
        width, result = _rows(connection, query, seconds, most_rows)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        parts["note"] = f"it ran longer than {seconds:g} s" if str(error) == "interrupted" else str(error)
        return parts
    same = result == rows if _ordered(reference) else Counter(result) == Counter(rows)
    parts["execution"] = float(width == columns and same)
    parts["note"] = (
        "" if parts["execution"] else f"{len(result)} rows with {width} columns differ from the reference's result"
    )
    return parts


@lru_cache(maxsize=4)
def _prepared(
    schema: str, reference: str, seconds: float, most_rows: int
) -> tuple[sqlite3.Connection, frozenset[str], int, list[Any]]:
    """Return a read-only database, the tables and columns that the reference reads, and the result of the reference."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        with _limited(connection, seconds):
            connection.executescript(schema)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ValueError(f"the column `schema` has a script that fails: {error}") from None
    # Temporary data that does not fit into memory must not be written to the disk.
    connection.execute("PRAGMA temp_store = MEMORY")
    if hasattr(connection, "setlimit"):
        connection.setlimit(_LENGTH, LONGEST_VALUE)
    connection.set_authorizer(_reading_only)
    try:
        touched = _touched(connection, reference)
        columns, rows = _rows(connection, reference, seconds, most_rows)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise ValueError(f"the column `query` has {reference!r:.200}, which fails: {error}") from None
    return connection, touched, columns, rows


def _reading_only(action: int, first: str | None, second: str | None, *_: Any) -> int:
    if action == sqlite3.SQLITE_FUNCTION:
        return sqlite3.SQLITE_DENY if (second or "").lower() in _NO_FUNCTIONS else sqlite3.SQLITE_OK
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _touched(connection: sqlite3.Connection, query: str) -> frozenset[str]:
    """Return the tables and columns that a query reads, as sqlite names them. The query is compiled and not run.

    Raises:
        sqlite3.Error, sqlite3.Warning: the query does not compile, is more than one statement, or would not only read.
        ValueError: the text is not a query.
    """
    if not _READING.match(query):
        raise ValueError("only a statement that begins with SELECT, WITH or VALUES is run")
    found: set[str] = set()

    def watch(action: int, first: str | None, second: str | None, *others: Any) -> int:
        if action == sqlite3.SQLITE_READ and first:
            found.add(first.lower())
            if second:
                found.add(f"{first}.{second}".lower())
        return _reading_only(action, first, second, *others)

    connection.set_authorizer(watch)
    try:
        connection.execute(f"EXPLAIN {query}").close()
    finally:
        connection.set_authorizer(_reading_only)
    return frozenset(found)


def _rows(connection: sqlite3.Connection, query: str, seconds: float, most_rows: int) -> tuple[int, list[Any]]:
    """Return the number of columns and the rows of a result; real numbers have 9 digits."""
    with _limited(connection, seconds):
        cursor = connection.execute(query)
        try:
            rows = cursor.fetchmany(most_rows + 1)
        finally:
            cursor.close()
    if len(rows) > most_rows:
        raise ValueError(f"the result has more than {most_rows} rows")
    return len(cursor.description or ()), [tuple(map(_rounded, row)) for row in rows]


@contextmanager
def _limited(connection: sqlite3.Connection, seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    late: Callable[[], int] = lambda: int(time.monotonic() > end)  # noqa: E731
    connection.set_progress_handler(late, INSTRUCTIONS_BETWEEN_LOOKS)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)


def _rounded(value: Any) -> Any:
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _ordered(query: str) -> bool:
    """Whether a query orders its result: it has ORDER BY outside all parentheses, texts and comments."""
    plain, depth = [], 0
    for character in _LITERAL.sub(" ", query):
        depth += {"(": 1, ")": -1}.get(character, 0)
        plain.append(character if not depth else " ")
    return re.search(r"\border\s+by\b", "".join(plain), re.IGNORECASE) is not None


def _grams(query: str) -> frozenset[str]:
    """Return the pairs of neighbouring tokens, in lower case except for texts in quotes."""
    plain = query.strip().rstrip(";")
    tokens = [token if token.startswith("'") else token.lower() for token in _TOKEN.findall(plain)]
    return frozenset(" ".join(tokens[k : k + GRAM]) for k in range(max(len(tokens) - GRAM + 1, 1)))


def _overlap(one: frozenset[str], other: frozenset[str]) -> float:
    """Return the Jaccard index of two sets; 1 for two empty sets."""
    return len(one & other) / len(one | other) if one or other else 1.0
