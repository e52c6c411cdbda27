"""SQL on an embedded database. The reward `sql` runs this module in a separate process, without torch."""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Result:
    """The result of a query: its number of columns, and what is compared of its rows."""

    width: int
    rows: list[Any]

    def same(self, other: _Result, ordered: bool) -> bool:
        """Whether two results are equal, in the order of the rows or in any order."""
        if self.width != other.width:
            return False
        return self.rows == other.rows if ordered else Counter(self.rows) == Counter(other.rows)


@dataclass(frozen=True)
class _Database:
    """A database, and the results of the reference on it.

    Attributes:
        connection: the database; it can only be read.
        results: the result of the reference. If the reference orders its rows, there is a second result, for which
            sqlite goes backwards through everything that has no order.
    """

    connection: sqlite3.Connection
    results: tuple[_Result, ...]


@dataclass(frozen=True)
class _Limits:
    """Limits of a query, and whether 1 and 1.0 differ."""

    seconds: float
    most_rows: int
    types: bool


@dataclass(frozen=True)
class _Problem:
    """The databases of a problem, and the tables and columns that the reference reads."""

    databases: tuple[_Database, ...]
    touched: frozenset[str]
    ordered: bool

    @property
    def empty(self) -> bool:
        """Whether the reference has no row on any of the databases."""
        return not any(result.rows for database in self.databases for result in database.results)


def judge(
    schemas: list[str], reference: str, query: str, seconds: float, most_rows: int, types: bool = True
) -> dict[str, Any]:
    """Compare a query with the reference on the databases that scripts create.

    Args:
        schemas: scripts that create and fill the tables, one for each database; they are trusted.
        reference: the right query.
        query: the query that is judged.
        seconds: how long each of the two queries may run on a database.
        most_rows: how many rows a result may have.
        types: whether an integer and a real number of the same value are different.

    Returns:
        The parts `syntax`, `tables`, `ngram` and `execution`, see `sql.Sql`; and `note`, the error of the query.

    Raises:
        ValueError: a script or the reference fails, or the scripts create different tables.
    """
    limits = _Limits(seconds, most_rows, types)
    problem = _prepared(tuple(schemas), reference, limits)
    parts: dict[str, Any] = {"syntax": 0.0, "tables": 0.0, "execution": 0.0, "note": ""}
    parts["ngram"] = _overlap(_grams(reference), _grams(query))
    try:
        own = _touched(problem.databases[0].connection, query)
        parts.update(syntax=1.0, tables=_overlap(problem.touched, own))
        parts["note"] = _difference(problem, own, query, limits)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        parts["note"] = f"it ran longer than {seconds:g} s" if str(error) == "interrupted" else str(error)
        return parts
    parts["execution"] = float(not parts["note"])
    return parts


def _difference(problem: _Problem, touched: frozenset[str], query: str, limits: _Limits) -> str:
    """Return how the results of a query differ from the results of the reference; "" if they do not."""
    for number, database in enumerate(problem.databases):
        for backwards in range(len(database.results)):
            result = _rows(database.connection, query, limits, bool(backwards))
            # A part of the reference may leave an order open. Then both directions are right.
            if not any(result.same(right, problem.ordered) for right in database.results):
                place = f"on database {number + 1}, " if len(problem.databases) > 1 else ""
                found = f"{len(result.rows)} rows with {result.width} columns"
                if backwards:
                    return f"{place}{found} have the reference's order by chance; the query needs an ORDER BY"
                return f"{place}{found} differ from the reference's result"
    if problem.empty and touched != problem.touched:
        return "no row, as the reference, but it reads other tables or columns"
    return ""


@lru_cache(maxsize=4)
def _prepared(schemas: tuple[str, ...], reference: str, limits: _Limits) -> _Problem:
    """Return the databases of a problem, with the results of the reference."""
    connections, tables = zip(*(_created(script, limits.seconds) for script in schemas))
    for number, own in enumerate(tables):
        if own != tables[0]:
            raise ValueError(
                f"the column `schema` has scripts that create different tables: script {number + 1} has "
                f"{_listed(own)}, and script 1 has {_listed(tables[0])}; the databases of a problem have the "
                "same tables and columns, with other rows"
            )
    ordered = _ordered(reference)
    for connection in connections:
        connection.set_authorizer(_reading_only)
    try:
        touched = _touched(connections[0], reference)
        databases = [
            _Database(
                connection,
                tuple(_rows(connection, reference, limits, backwards) for backwards in (False, True)[: 1 + ordered]),
            )
            for connection in connections
        ]
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise ValueError(f"the column `query` has {reference!r:.200}, which fails: {error}") from None
    return _Problem(tuple(databases), touched, ordered)


def _created(script: str, seconds: float) -> tuple[sqlite3.Connection, dict[str, list[str]]]:
    """Return the database that a script creates, and its tables."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        with _limited(connection, seconds):
            connection.executescript(script)
            tables = _tables(connection)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ValueError(f"the column `schema` has a script that fails: {error}") from None
    # Temporary data that does not fit into memory must not be written to the disk.
    connection.execute("PRAGMA temp_store = MEMORY")
    if hasattr(connection, "setlimit"):
        connection.setlimit(_LENGTH, LONGEST_VALUE)
    return connection, tables


def _tables(connection: sqlite3.Connection) -> dict[str, list[str]]:
    """Return the names of the tables and views with the names of their columns."""
    found = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY 1").fetchall()
    # Not by the function `pragma_table_info`: a connection that has used it lets every later query use it too.
    quoted = {name: '"' + name.replace('"', '""') + '"' for (name,) in found}
    return {
        name.lower(): [row[1].lower() for row in connection.execute(f"PRAGMA table_info({quoted[name]})")]
        for (name,) in found
    }


def _listed(tables: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(columns)})" for name, columns in tables.items()) or "none"


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


def _rows(connection: sqlite3.Connection, query: str, limits: _Limits, backwards: bool = False) -> _Result:
    """Return the result of a query; if `backwards`, sqlite goes backwards through everything without an order."""
    connection.set_authorizer(_anything)
    connection.execute(f"PRAGMA reverse_unordered_selects = {int(backwards)}").close()
    connection.set_authorizer(_reading_only)
    with _limited(connection, limits.seconds):
        cursor = connection.execute(query)
        try:
            rows = cursor.fetchmany(limits.most_rows + 1)
        finally:
            cursor.close()
    if len(rows) > limits.most_rows:
        raise ValueError(f"the result has more than {limits.most_rows} rows")
    compared = [tuple(_compared(value, limits.types) for value in row) for row in rows]
    return _Result(len(cursor.description or ()), compared)


def _anything(*_: Any) -> int:
    return sqlite3.SQLITE_OK


@contextmanager
def _limited(connection: sqlite3.Connection, seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    late: Callable[[], int] = lambda: int(time.monotonic() > end)  # noqa: E731
    connection.set_progress_handler(late, INSTRUCTIONS_BETWEEN_LOOKS)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)


def _compared(value: Any, types: bool) -> Any:
    """Return what is compared of a value: real numbers to 9 digits, and the type if types count."""
    if isinstance(value, float):
        value = float(f"{value:.9g}")
    # Without its type, Python takes 1 and 1.0 for equal, but no text for equal to a number.
    return (type(value).__name__, value) if types else value


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
