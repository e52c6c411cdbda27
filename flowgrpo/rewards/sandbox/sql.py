"""SQL queries, run on an embedded database and compared with a reference, with partial credit.

The parts follow Reasoning-SQL (arXiv 2503.23157), without its judgement by a language model.
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
    """A query has the result of the reference: 1; otherwise a weighted mean of what it has in common with it.

    The query is the last fenced block of the completion, or all of it. It runs on a database in memory that the
    column `schema` makes. A query with the reference's result has the value 1 however it is written; another one has
    the mean, by weight, of

        execution   0: the result is another one, or there is none
        syntax      1: it compiles on this database as a single statement that reads
        tables      Jaccard index of the tables and columns that it and the reference read, as sqlite reports them
        ngram       Jaccard index of the pairs of neighbouring tokens of both

    Results are equal if they have the same rows, each as often; in the same order only if the reference has an ORDER
    BY of its own, outside of parentheses. Names of columns do not count, their order does; real numbers are compared
    to 9 digits. Fill the tables so that a wrong query has another result: `SELECT 3` is right if 3 is the result.

    Nothing but reading is allowed, by sqlite's authorizer: DROP, INSERT, ATTACH, PRAGMA and several statements have no
    syntax part. A query that runs longer than `seconds`, or has more than `most_rows` rows, has no result. The whole
    runs in a process of its own with limited memory, which is killed when a call inside of sqlite does not end.

    Args:
        weights: part -> weight in the mean; 3 for execution and 1 for the others if absent.
        seconds: how long a query may run.
        most_rows: how many rows a result may have.
        memory_mb: most megabytes of address space for the database.

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
        """Run queries.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            schema: B scripts that create and fill the tables.
            query: B references; None where there is none.

        Returns:
            Scores with B values in [0, 1], NaN without a reference. Sub-scores are the parts. Notes are the errors.

        Raises:
            ValueError: a script or a reference fails, or is no text.
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
            # The limits of sqlite end a query in time, and this one what they do not see.
            parts = self._worker(script, reference, query, self.seconds, self.most_rows, seconds=4 * self.seconds + 10)
        except GaveUp as error:
            return dict.fromkeys(DEFAULT_WEIGHTS, 0.0), f"the query was given up: {error}"
        except ValueError as error:
            raise ValueError(f"sql: {error}") from None
        return parts, parts.pop("note")
