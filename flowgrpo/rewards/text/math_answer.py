"""Mathematical answers, equal as formulas by the package math-verify."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..base import require
from ..options import check_flag, check_memory, check_seconds
from ..scores import Scores
from ..worker import GaveUp, Worker
from .answer import check_rule, compared, note, references
from .extraction import canonical, final_answer

LONGEST_FORMULA = 1000


class MathAnswer:
    r"""The final answer equals the column `answer` as a formula: 1, else 0. Needs the package math-verify.

    The final answer is found as by the reward `answer`. It is right if it is equal there, or if math-verify, which
    reads LaTeX and plain formulas with sympy, finds the two equal: `x^2-1` and `(x-1)(x+1)`, `\frac{\sqrt{2}}{2}`
    and `1/\sqrt{2}`, `\{1, 2\}` and `\{2, 1\}`. A word is read as a product of letters, so for words use `answer`.

    Every comparison runs in a process of its own, which is killed after `seconds`; that counts as not equal. So does
    an answer of more than 1000 characters that is not the very text.

    Args:
        extract: what counts as the answer of a completion without box and tag, see `answer`.
        among: compare wrong answers to one prompt with each other too, so that equal formulas are one in `answers`:
            up to a comparison for each pair of them.
        seconds: how long a comparison may take.
        memory_mb: most megabytes of address space for the comparisons.

    Raises:
        ValueError: an option is wrong.
        ModuleNotFoundError: math-verify is not installed.
    """

    name = "math"

    def __init__(
        self, extract: str = "whole", among: bool = False, seconds: float = 5.0, memory_mb: int = 2048
    ) -> None:
        check_rule(self.name, extract)
        check_flag(self.name, "among", among)
        check_seconds(self.name, seconds)
        check_memory(self.name, memory_mb)
        require("math_verify")
        self.extract, self.among, self.seconds = extract, among, seconds
        self._worker = Worker(f"{__package__}.math_equality:equal", memory_mb)

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], answer: Sequence[Any]) -> Scores:
        """Compare final answers as formulas.

        Args:
            completions: B strings.
            prompts: B strings; with `among`, answers to equal ones are compared.
            answer: B references: a formula, a number, or a list of several that are right; None where there is none.

        Returns:
            Scores with B values, 0, 1, or NaN without a reference. Sub-scores: `found`, whether there is an answer;
            `exact`, whether it is equal without algebra. Notes are the answers, and why one was given up. `answers`
            has the first reference for all that are right, and the others as the reward `answer` has them.

        Raises:
            ValueError: a reference is empty or of another type.
        """
        found = [final_answer(text, self.extract) for text in completions]
        notes = [note(given) for given in found]
        values, exact = [], []
        answers: list[str | None] = []
        for row, (given, reference) in enumerate(zip(found, answer, strict=True)):
            accepted = references(self.name, reference)
            same = given is not None and canonical(given) in [canonical(other) for other in accepted]
            exact.append(float(same) if accepted else math.nan)
            equal = same or (given is not None and bool(accepted) and self._equal(given, accepted, notes, row))
            values.append(float(equal) if accepted else math.nan)
            answers.append(compared(accepted[0] if equal and accepted else given))
        if self.among:
            wrong = {row: text for row, text in enumerate(found) if text is not None and values[row] != 1}
            self._merge(answers, wrong, prompts, notes)
        subs = {"found": [float(given is not None) for given in found], "exact": exact}
        return Scores(values, subs, notes, answers=answers)

    def close(self) -> None:
        """End the process that compares."""
        self._worker.close()

    def _merge(
        self, answers: list[str | None], wrong: dict[int, str], prompts: Sequence[str], notes: list[str]
    ) -> None:
        """Give those of some rows' answers to one prompt that are equal formulas what the first of them has."""
        firsts: dict[str, dict[str | None, int]] = {}
        for row, text in wrong.items():
            own, known = answers[row], firsts.setdefault(prompts[row], {})
            if own not in known:
                others = dict.fromkeys(known.values())
                known[own] = next((k for k in others if self._equal(text, [wrong[k]], notes, row)), row)
            answers[row] = answers[known[own]]

    def _equal(self, given: str, accepted: list[str], notes: list[str], row: int) -> bool:
        if len(given) > LONGEST_FORMULA:
            notes[row] += f"; {len(given)} characters are too long for a formula"
            return False
        try:
            return bool(self._worker(given, accepted, seconds=self.seconds))
        except GaveUp as error:
            notes[row] += f"; the comparison was given up: {error}"
            return False
