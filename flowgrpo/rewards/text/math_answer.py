"""Mathematical answers, compared as formulas by the package math-verify."""

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
    r"""1 if the final answer equals the column `answer` as a formula, else 0. Needs the package math-verify.

    The final answer is found in the same way as by the reward `answer`. It is right if it is right for the reward
    `answer`, or if math-verify finds that the two formulas are equal. math-verify reads LaTeX and plain formulas with
    sympy: `x^2-1` equals `(x-1)(x+1)`, `\frac{\sqrt{2}}{2}` equals `1/\sqrt{2}`, and `\{1, 2\}` equals `\{2, 1\}`. It
    reads a word as a product of letters, so for words use `answer`.

    Comparisons run in a separate process. If a comparison takes longer than `seconds`, the process is killed, and the
    answer counts as not equal. An answer of more than 1000 characters counts as equal only if its text is the same.

    Args:
        extract: what counts as the answer in a completion without box and tag, see `answer`.
        among: if true, also compare the wrong answers to a prompt with each other, so that equal formulas have the same
            text in `answers`. This takes up to one comparison for each pair of wrong answers.
        seconds: how long a comparison may take.
        memory_mb: how many megabytes of address space the comparisons may take.

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
            prompts: B strings; with `among`, the answers to equal prompts are compared.
            answer: B references: a formula, a number, or a list of right answers; None if there is no reference.

        Returns:
            Scores with B values: 0, 1, or NaN without a reference. Sub-scores: `found`, whether there is an answer;
            `exact`, whether the answer is equal without algebra. Notes are the answers, and the reason if a comparison
            was given up. In `answers`, every right answer is the first reference; the other answers are as in the
            reward `answer`.

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
        """Replace each wrong answer by the first wrong answer to the same prompt that is an equal formula."""
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
