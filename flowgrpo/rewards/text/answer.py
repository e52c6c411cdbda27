"""Answers with known references: a verifiable reward that needs no model and executes nothing.

Numbers are compared exactly, and texts without their unimportant differences. Both rules are in `extraction.py`;
`majority` uses the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...parts.plugins import nearest
from ..options import check_flag
from ..scores import Scores
from .extraction import RULES, agreement, canonical, final_answer

SHOWN = 200


class Answer:
    r"""The final answer equals the column `answer`: a number exactly, a text without regard to case and white space.

    The final answer is the content of the last `\boxed{...}`. If there is no box, it is the content of the last
    `<answer>...</answer>`. If there is no tag either, `extract` decides. An answer that was cut off before its brace or
    tag was closed does not count as an answer.

    Args:
        extract: "whole": the whole completion is the answer. "last_number": the last number in it is the answer.
            "marked": only a box or a tag counts.
        partial: if true, a wrong answer gets credit: the number of characters that agree with the right answer, from
            the start and from the end, divided by the length of the longer answer. 123 in place of 124 gets 2/3. If
            false, a wrong answer gets 0.

    Raises:
        ValueError: an option is wrong.
    """

    name = "answer"

    def __init__(self, extract: str = "whole", partial: bool = False) -> None:
        check_rule(self.name, extract)
        check_flag(self.name, "partial", partial)
        self.extract, self.partial = extract, partial

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], answer: Sequence[Any]) -> Scores:
        """Compare final answers.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            answer: B references: a text, a number, or a list of right answers; None if there is no reference. Of a text
                with a box or tag, only the content of the box or tag counts.

        Returns:
            Scores with B values in [0, 1], NaN without a reference. Sub-scores: `found`, whether there is an answer;
            with `partial` also `exact`, whether the answer is right. Notes are the answers as they were written;
            `answers` are the answers as they were compared.

        Raises:
            ValueError: a reference is empty or of another type.
        """
        found = [final_answer(text, self.extract) for text in completions]
        exact: list[float] = []
        values: list[float] = []
        for given, reference in zip(found, answer, strict=True):
            accepted = references(self.name, reference)
            right = [canonical(given or "") == canonical(other) for other in accepted] if given else []
            exact.append(float(any(right)) if accepted else float("nan"))
            close = max((agreement(given or "", other) for other in accepted), default=0.0) if self.partial else 0.0
            values.append(exact[-1] if exact[-1] else close)
        subs = {"found": [float(given is not None) for given in found], **({"exact": exact} if self.partial else {})}
        return Scores(values, subs, [note(given) for given in found], answers=[compared(given) for given in found])


def references(reward: str, value: Any) -> list[str]:
    """Return the accepted answers in one value of the column `answer`; an empty list for None.

    Raises:
        ValueError: the value is empty, or is not a text, a number or a list of texts and numbers.
    """
    if value is None:
        return []
    accepted = []
    for single in value if isinstance(value, (list, tuple)) else [value]:
        text = final_answer(str(single)) if isinstance(single, (str, int, float)) else None
        if text is None or isinstance(single, bool):
            raise ValueError(
                f"{reward}: the column `answer` has {value!r:.80}; give a text, a number, a list of right answers, "
                "or null where there is no answer"
            )
        accepted.append(text)
    if not accepted:
        raise ValueError(f"{reward}: the column `answer` has an empty list; give null where there is no answer")
    return accepted


def compared(answer: str | None) -> str | None:
    """Return an answer in the form in which it is compared, as a text; equal answers give the same text."""
    return None if answer is None else str(canonical(answer))


def note(answer: str | None) -> str:
    """Return the note about a sample: its answer, shortened."""
    if answer is None:
        return "no answer"
    return f"answer: {answer if len(answer) <= SHOWN else answer[:SHOWN] + '...'}"


def check_rule(reward: str, extract: Any) -> None:
    """Refuse an option `extract` that is not a rule of `extraction.final_answer`."""
    if extract not in RULES:
        raise ValueError(
            f"{reward}: extract is {extract!r}{nearest(str(extract), RULES)} Write one of {', '.join(RULES)}"
        )
