"""Answers that can be looked up: the reward of learning with verifiable rewards, without a model or an evaluation.

Numbers are compared exactly and texts after their unimportant differences were removed; see `extraction.py` for both
rules, which `majority` shares.
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
    r"""The final answer equals the column `answer`: a number exactly, or a text but for case and spaces.

    The final answer is the content of the last `\boxed{...}`; without one, of the last `<answer>...</answer>`;
    without either, what `extract` says. An answer that was cut off before its brace or tag closed is none.

    Args:
        extract: "whole": the whole completion is the answer. "last_number": the last number in it is. "marked":
            only a box or a tag counts.
        partial: give a wrong answer credit for the characters that agree with the right one from the start and from
            the end, over the length of the longer one: 123 for 124 has 2/3. Otherwise it gets 0.

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
            answer: B references: a text, a number, or a list of several that are right; None where there is none. A
                text with a box or tag counts as what is inside.

        Returns:
            Scores with B values in [0, 1], NaN without a reference. Sub-scores: `found`, whether there is an answer;
            with `partial`, `exact`. Notes are the answers as they
            were written, `answers` as they were compared.

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
    """The accepted answers in one value of the column `answer`; none where it is None.

    Raises:
        ValueError: it is empty, or no text, number or list of such.
    """
    if value is None:
        return []
    accepted = []
    for single in value if isinstance(value, (list, tuple)) else [value]:
        text = final_answer(str(single)) if isinstance(single, (str, int, float)) else None
        if text is None or isinstance(single, bool):
            raise ValueError(
                f"{reward}: the column `answer` has {value!r:.80}; give a text, a number, a list of those that are "
                "right, or null where there is no answer"
            )
        accepted.append(text)
    if not accepted:
        raise ValueError(f"{reward}: the column `answer` has an empty list; give null where there is no answer")
    return accepted


def compared(answer: str | None) -> str | None:
    """What of an answer is compared, as a text: the same for two answers that are equal."""
    return None if answer is None else str(canonical(answer))


def note(answer: str | None) -> str:
    """What is written about a sample: its answer, shortened."""
    if answer is None:
        return "no answer"
    return f"answer: {answer if len(answer) <= SHOWN else answer[:SHOWN] + '...'}"


def check_rule(reward: str, extract: Any) -> None:
    """Refuse an option `extract` that is no rule of `extraction.final_answer`."""
    if extract not in RULES:
        raise ValueError(
            f"{reward}: extract is {extract!r}{nearest(str(extract), RULES)} Write one of {', '.join(RULES)}"
        )
