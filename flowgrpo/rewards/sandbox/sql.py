"""SQL queries, which run on an embedded database and are compared with a reference, with partial credit.

The parts follow Reasoning-SQL (arXiv 2503.23157), except for its judge, which is a language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..options import check_memory, check_seconds, check_weights, weighted
from ..scores import Scores
from ..text.extraction import fenced
from ..worker import GaveUp, Worker

DEFAULT_WEIGHTS = {"execution": 3.0, "syntax": 1.0, "tables": 1.0, "ngram": 1.0}
LONGEST_QUERY = 10_000


class Sql:
    """1 if a query has the same result as the reference; otherwise a weighted mean of what the two have in common.

    The query is the last fenced block of the completion, or the whole completion if there is no block. It runs on a
    database in memory, which the script in the column `schema` creates. The column may also have a list of scripts with
    the same tables and other rows. The results then have to be equal on every database. A query with the same
    results as the reference has the value 1, in whatever way it is written. Any other query has the weighted mean of
    these parts:

        execution   0, because a result is different or there is none
        syntax      1 if the query compiles on the first database as a single statement that only reads
        tables      Jaccard index of the tables and columns that the query and the reference read, as sqlite reports
                    them
        ngram       Jaccard index of the pairs of neighbouring tokens of the query and of the reference

    Two results are equal if they have as many columns and the same rows, each row equally often. This counts:

    - The order of the rows, if the reference has an ORDER BY outside parentheses. Then both queries run a second time,
      and sqlite goes backwards through everything that has no order. So a query without ORDER BY is not right because
      its rows happen to be in order. Rows that are equal in what the reference orders by have the order in which sqlite
      gives them to the reference. So let the reference order by something that no two rows have in common.
    - The order of the columns, but not their names.
    - The types of values, as sqlite's `typeof` gives them: 1, 1.0 and '1' are three values. With `types: false`, 1 and
      1.0 are equal. Real numbers are compared to 9 digits.
    - Empty results. If the reference has no row on any database, then a query has to read the same tables and columns
      as the reference, because every query with a false condition has no row either.

    Equal results are no proof of an equal query. On one database, `SELECT 3` is right if the result is 3, and
    `age > 35` is right where `age > 39` is meant and nobody is 36 to 39. Give several databases, fill them so that
    wrong queries have other results, and do not show their rows in the prompt.

    sqlite's authorizer allows only reading. DROP, INSERT, ATTACH, PRAGMA, and more than one statement get 0 for syntax.
    A query that runs longer than `seconds`, or has more than `most_rows` rows, has no result. Everything runs in a
    separate process with limited memory. The process is killed if a call inside sqlite does not end.

    Args:
        weights: part -> weight in the mean; if absent, 3 for execution and 1 for the other parts.
        seconds: how long a query may run on one database.
        most_rows: how many rows a result may have.
        memory_mb: how many megabytes of address space the databases may take.
        types: whether an integer and a real number of the same value are different.

    Raises:
        ValueError: an option is wrong.
    """

    name = "sql"

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        seconds: float = 2.0,
        most_rows: int = 10_000,
        memory_mb: int = 1024,
        types: bool = True,
    ) -> None:
        check_seconds(self.name, seconds)
        check_memory(self.name, memory_mb)
        if isinstance(most_rows, bool) or not isinstance(most_rows, int) or most_rows < 1:
            raise ValueError(f"sql: most_rows is {most_rows!r}; give a whole number of 1 or more")
        if not isinstance(types, bool):
            raise ValueError(f"sql: types is {types!r}; give true or false")
        self.weights = check_weights(self.name, weights, DEFAULT_WEIGHTS)
        self.seconds, self.most_rows, self.types = seconds, most_rows, types
        self._worker = Worker(f"{__package__}.sql_run:judge", memory_mb)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], schema: Sequence[Any], query: Sequence[Any]
    ) -> Scores:
        """Run queries and compare their results.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            schema: B scripts that create and fill the tables, or lists of such scripts, one for each database.
            query: B references; None if there is no reference.

        Returns:
            Scores with B values in [0, 1], NaN without a reference. Sub-scores are the parts. Notes are the errors.

        Raises:
            ValueError: a script or a reference fails, or is not a text; or scripts of a list create different tables.
        """
        rows: list[dict[str, float]] = []
        notes = []
        for text, script, reference in zip(completions, schema, query, strict=True):
            parts, note = self._parts(text, script, reference)
            rows.append(parts)
            notes.append(note)
        values = [1.0 if parts["execution"] == 1 else weighted(self.weights, parts) for parts in rows]
        return Scores(values, {part: [row[part] for row in rows] for part in DEFAULT_WEIGHTS}, notes)

    def close(self) -> None:
        """End the process that runs queries."""
        self._worker.close()

    def _parts(self, text: str, script: Any, reference: Any) -> tuple[dict[str, float], str]:
        if reference is None:
            return dict.fromkeys(DEFAULT_WEIGHTS, float("nan")), ""
        scripts = [script] if isinstance(script, str) else script
        usable = isinstance(scripts, list) and scripts and all(isinstance(one, str) for one in scripts)
        if not usable or not isinstance(reference, str):
            raise ValueError(
                f"sql: the columns `schema` and `query` have {script!r:.80} and {reference!r:.80}; give texts, "
                "a list of texts as `schema` for several databases, or null as `query` where there is no reference"
            )
        query = fenced(text).strip()
        if not query or len(query) > LONGEST_QUERY:
            why = f"{len(query)} characters are too long for a query" if query else "no query"
            return dict.fromkeys(DEFAULT_WEIGHTS, 0.0), why
        try:
            # The limits inside sqlite end a slow query. This longer limit ends what they do not notice. There are a
            # script, the reference and the query, the last two in both directions.
            most = 10 + 6 * self.seconds * len(scripts)
            parts = self._worker(scripts, reference, query, self.seconds, self.most_rows, self.types, seconds=most)
        except GaveUp as error:
            return dict.fromkeys(DEFAULT_WEIGHTS, 0.0), f"the query was given up: {error}"
        except ValueError as error:
            raise ValueError(f"sql: {error}") from None
        return parts, parts.pop("note")
