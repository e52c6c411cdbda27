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
    database in memory, which the script in the column `schema` creates. A query with the same result as the reference
    has the value 1, in whatever way it is written. Any other query has the weighted mean of these parts:

        execution   0, because the result is different or there is none
        syntax      1 if the query compiles on this database as a single statement that only reads
        tables      Jaccard index of the tables and columns that the query and the reference read, as sqlite reports
                    them
        ngram       Jaccard index of the pairs of neighbouring tokens of the query and of the reference

    Two results are equal if they have the same rows, and each row equally often. The order of the rows counts only if
    the reference has an ORDER BY outside parentheses. Names of columns do not count, but the order of the columns does.
    Real numbers are compared to 9 digits. Fill the tables so that a wrong query has another result: `SELECT 3` is right
    if the result is 3.

    sqlite's authorizer allows only reading. DROP, INSERT, ATTACH, PRAGMA, and more than one statement get 0 for syntax.
    A query that runs longer than `seconds`, or has more than `most_rows` rows, has no result. Everything runs in a
    separate process with limited memory. The process is killed if a call inside sqlite does not end.

    Args:
        weights: part -> weight in the mean; if absent, 3 for execution and 1 for the other parts.
        seconds: how long a query may run.
        most_rows: how many rows a result may have.
        memory_mb: how many megabytes of address space the database may take.

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
    ) -> None:
        check_seconds(self.name, seconds)
        check_memory(self.name, memory_mb)
        if isinstance(most_rows, bool) or not isinstance(most_rows, int) or most_rows < 1:
            raise ValueError(f"sql: most_rows is {most_rows!r}; give a whole number of 1 or more")
        self.weights = check_weights(self.name, weights, DEFAULT_WEIGHTS)
        self.seconds, self.most_rows = seconds, most_rows
        self._worker = Worker(f"{__package__}.sql_run:judge", memory_mb)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], schema: Sequence[Any], query: Sequence[Any]
    ) -> Scores:
        """Run queries and compare their results.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            schema: B scripts that create and fill the tables.
            query: B references; None if there is no reference.

        Returns:
            Scores with B values in [0, 1], NaN without a reference. Sub-scores are the parts. Notes are the errors.

        Raises:
            ValueError: a script or a reference fails, or is not a text.
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
        if not isinstance(script, str) or not isinstance(reference, str):
            raise ValueError(
                f"sql: the columns `schema` and `query` have {script!r:.80} and {reference!r:.80}; give texts, "
                "or null as `query` where there is no reference"
            )
        query = fenced(text).strip()
        if not query or len(query) > LONGEST_QUERY:
            why = f"{len(query)} characters are too long for a query" if query else "no query"
            return dict.fromkeys(DEFAULT_WEIGHTS, 0.0), why
        try:
            # The limits inside sqlite end a slow query. This longer limit ends what they do not notice.
            parts = self._worker(script, reference, query, self.seconds, self.most_rows, seconds=4 * self.seconds + 10)
        except GaveUp as error:
            return dict.fromkeys(DEFAULT_WEIGHTS, 0.0), f"the query was given up: {error}"
        except ValueError as error:
            raise ValueError(f"sql: {error}") from None
        return parts, parts.pop("note")
