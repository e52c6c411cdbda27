"""Calls of tools compared with the calls of a reference, one with one: a score for each turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scipy.optimize import linear_sum_assignment

from ..scores import Scores
from .tool_calls import BEGIN, END, calls_in, check_marks, likeness


class ToolMatch:
    """How well the calls of a completion match the column `calls`, as a whole and turn by turn.

    Calls and references are matched one with one, so that the sum of the likenesses is the largest (Hungarian method).
    This is the hard assignment of MatchTIR (arXiv 2601.10712). With `parts` that end where a tool has answered, and
    credit `parts`, each turn is credited with its own matches.

    Args:
        begin: text that begins a call, as in rollout.form.
        end: text that ends a call, as in rollout.form.
        unmatched: score of a call that has no partner, or a partner that is not alike at all; at most 0.

    Raises:
        ValueError: an option is wrong.
    """

    name = "tool_match"

    def __init__(self, begin: str = BEGIN, end: str = END, unmatched: float = 0.0) -> None:
        check_marks(self.name, begin, end)
        known = isinstance(unmatched, (int, float)) and not isinstance(unmatched, bool)
        if not known or not -math.inf < unmatched <= 0:
            raise ValueError(f"{self.name}: unmatched is {unmatched!r}; give a number of at most 0, such as -0.5")
        self.begin, self.end, self.unmatched = begin, end, float(unmatched)

    def __call__(
        self,
        completions: Sequence[str],
        prompts: Sequence[str],
        calls: Sequence[Any],
        parts: Sequence[Sequence[str]] | None = None,
    ) -> Scores:
        """Match calls.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            calls: B lists with the texts of the calls that a right completion makes; None if they are not known.
            parts: B lists of the texts of the parts of each completion. A call that two parts share is not found.

        Returns:
            Scores with B values, the sum of the scores of all calls over the larger number of calls and references; 1
            if there are neither; NaN without references. Sub-score `calls`: the number of calls. With `parts`, the
            score of a part is the sum of the scores of its calls, 0 without a call.

        Raises:
            ValueError: a reference is no list of texts.
        """
        cut = [[text] for text in completions] if parts is None else parts
        values, counts, by_part = list[float](), list[float](), list[list[float] | None]()
        for own, wanted in zip(cut, calls, strict=True):
            found = [calls_in(text, self.begin, self.end) for text in own]
            counts.append(float(sum(map(len, found))))
            if wanted is None:
                values.append(math.nan)
                by_part.append(None)
                continue
            if not isinstance(wanted, (list, tuple)) or not all(isinstance(one, str) for one in wanted):
                raise ValueError(f"{self.name}: the column `calls` has {wanted!r:.80}; give a list of texts, or null")
            each = iter(self.matched([call for part in found for call in part], wanted))
            by_part.append([math.fsum(next(each) for _ in part) for part in found])
            most = max(counts[-1], float(len(wanted)))
            values.append(math.fsum(by_part[-1] or []) / most if most else 1.0)
        return Scores(values, {"calls": counts}, parts=() if parts is None else by_part)

    def matched(self, calls: Sequence[str], wanted: Sequence[str]) -> list[float]:
        """The score of each call: the likeness to its partner, or `unmatched`."""
        alike = [[likeness(call, other) for other in wanted] for call in calls]
        scores = [self.unmatched] * len(calls)
        if calls and wanted:
            for row, column in zip(*linear_sum_assignment(alike, maximize=True)):
                scores[row] = alike[row][column] or self.unmatched
        return scores
