"""Arithmetic in completions, checked line by line: a process reward that needs no model.

`equation_reading.equations` says what counts as an equation, and when an equation holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..scores import Scores
from .answer import SHOWN, check_rule, compared, references
from .equation_reading import Equation, equations
from .extraction import canonical, final_answer


class Equations:
    r"""All equations of numbers hold, line by line or part by part, and the final answer is right if it is known.

    Args:
        extract: what counts as the final answer in a completion without box and tag, as for the reward `answer`.
        least: smallest number of different equations in a completion; with fewer, the last part is wrong.
        decimals: smallest number of decimal places of a rounded result after an equals sign; after ≈, any number will
            do.

    Raises:
        ValueError: an option is wrong.
    """

    name = "equations"

    def __init__(self, extract: str = "last_number", least: int = 1, decimals: int = 2) -> None:
        check_rule(self.name, extract)
        for option, value in (("least", least), ("decimals", decimals)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{self.name}: {option} is {value!r}; give a whole number of 0 or more")
        self.extract, self.least, self.decimals = extract, least, decimals

    def __call__(
        self,
        completions: Sequence[str],
        prompts: Sequence[str],
        parts: Sequence[Sequence[str]] | None = None,
        answer: Sequence[Any] | None = None,
    ) -> Scores:
        """Check equations and final answers.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            parts: B lists of the texts of the parts of each completion; if left out, the parts are the lines.
            answer: B references as for the reward `answer`; if left out, there are no references.

        Returns:
            Scores with a score for each part: 1 if all equations of the part hold, 0 if not, NaN if it has no equation.
            The score of the last part is also 0 if the final answer is wrong or if there are too few equations; it is 1
            if the part has no equation and the final answer is right. The B values are the smallest score of the parts,
            NaN if all are NaN. Sub-scores: `equations`, the number of equations; `right`, the share of the equations
            that hold; with the column `answer`, whether the final answer is right. A note is the first equation that
            does not hold. `answers` are the final answers.

        Raises:
            ValueError: a reference is empty or of another type.
        """
        cut = [text.splitlines() or [text] for text in completions] if parts is None else parts
        found = [[equations(text, self.decimals) for text in own] for own in cut]
        given = [final_answer(text, self.extract) for text in completions]
        right = [math.nan] * len(completions) if answer is None else list(map(self._right, given, answer))
        scores = [self._scores(own, verdict) for own, verdict in zip(found, right, strict=True)]
        shown = [[equation for part in own for equation in part] for own in found]
        subs = {
            "equations": [float(len(own)) for own in shown],
            "right": [sum(one.holds for one in own) / len(own) if own else math.nan for own in shown],
            **({} if answer is None else {"answer": right}),
        }
        values = [min((score for score in own if not math.isnan(score)), default=math.nan) for own in scores]
        return Scores(
            values, subs, [_note(own) for own in shown], answers=[compared(one) for one in given],
            parts=() if parts is None else scores,
        )  # fmt: skip

    def _right(self, given: str | None, reference: Any) -> float:
        accepted = references(self.name, reference)
        if not accepted:
            return math.nan
        return float(given is not None and any(canonical(given) == canonical(other) for other in accepted))

    def _scores(self, found: Sequence[Sequence[Equation]], right: float) -> list[float]:
        scores = [float(all(one.holds for one in part)) if part else math.nan for part in found]
        different = {"".join(one.text.split()) for part in found for one in part}
        if right == 0 or len(different) < self.least:
            scores[-1] = 0.0
        elif right == 1 and math.isnan(scores[-1]):
            scores[-1] = 1.0
        return scores


def _note(shown: Sequence[Equation]) -> str:
    wrong = next((one.text for one in shown if not one.holds), None)
    if wrong is None:
        return f"{len(shown)} equations hold" if shown else "no equation"
    return f"does not hold: {wrong if len(wrong) <= SHOWN else wrong[:SHOWN] + '...'}"
