"""The confidence that a completion states, scored by whether its answer is right.

ReFIne, "A Framework for Trustworthy Large Reasoning Models with Reliability, Faithfulness, and Interpretability" (arXiv
2510.09062).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from ..inputs import Inputs
from ..options import check_positive
from ..scores import Scores
from ..within import check_inner, inner_reward, inner_servers, score_within, signature_of
from .extraction import as_number, final_answer
from .text_format import check_tags, section_of


class Confidence:
    """One minus the Brier score of the confidence that a completion states in a tag, in [0, 1].

    The value is 1 - (c - y)², with the confidence c, and y = 1 for a right answer and 0 for a wrong one. Its mean is
    largest if c is the probability of a right answer. A completion that states no confidence gets 0.

    Args:
        correct: name of the reward that tells right from wrong, as in a recipe.
        tag: the last number within `<tag>...</tag>` is the confidence. 70%, 7/10 and, with a scale of 10, 7 are the
            same. A number outside [0, 1] is no confidence.
        scale: the largest confidence, for a number that is neither a percentage nor a fraction.
        correct_options: options of the reward `correct`.
        threshold: a completion is right if the reward `correct` gives at least this score.

    Raises:
        ValueError: an option is wrong, or the reward `correct` cannot be made.
        MissingDependency: the reward `correct` needs a package that is not installed.
    """

    name = "confidence"

    def __init__(
        self,
        correct: str,
        tag: str = "confidence",
        scale: float = 10.0,
        correct_options: Mapping[str, Any] | None = None,
        threshold: float = 1.0,
    ) -> None:
        check_tags(self.name, "tag", [tag])
        check_positive(self.name, "scale", scale, "10")
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not math.isfinite(threshold):
            raise ValueError(f"confidence: threshold is {threshold!r}; give a number")
        self.tag, self.scale, self.threshold = tag, scale, threshold
        self.correct = inner_reward(self.name, "correct", correct, correct_options)
        self.whole_group, self.remote = self.correct.whole_group, self.correct.remote
        # A failed call of a remote reward is repeated as a whole, so each call has one group only.
        self.batch_size = 1 if self.remote else None
        groups = ["groups"] if self.whole_group else []
        self.__signature__ = signature_of("prompts", "completions", *groups, *self.correct.needed)

    @staticmethod
    def check_options(name: str, options: Mapping[str, Any]) -> None:
        """Refuse a reward for `correct` that cannot be made.

        Raises:
            ValueError: its name or one of its options is wrong.
        """
        check_inner(name, "correct", options["correct"], options.get("correct_options"))

    @staticmethod
    def served_at(options: Mapping[str, Any]) -> list[str]:
        """The servers that the reward for `correct` asks, in words."""
        return inner_servers(options["correct"], options.get("correct_options"))

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], groups: Sequence[int] | None = None, **columns: Any
    ) -> Scores:
        """Score stated confidences.

        Args:
            completions: B strings.
            prompts: B strings.
            groups: B group ids, in any order, if `correct` compares whole groups.
            columns: name -> B values, for the reward `correct`.

        Returns:
            Scores with B values in [0, 1], NaN where `correct` gives no score. Sub-scores: `stated`, the confidence,
            NaN if there is none; and the score `correct`.
        """
        inputs = Inputs(list(completions), list(prompts), columns, None if groups is None else list(groups))
        given = score_within(self.correct, inputs, "reward `correct`").values.tolist()
        stated = [stated_confidence(section_of(text, self.tag) or "", self.scale) for text in completions]
        values = [
            math.nan if math.isnan(score) else 0.0 if math.isnan(c) else 1.0 - (c - float(score >= self.threshold)) ** 2
            for c, score in zip(stated, given, strict=True)
        ]
        return Scores(values, {"stated": stated, "correct": given})

    def close(self) -> None:
        """Close the reward `correct`."""
        self.correct.close()


def stated_confidence(text: str, scale: float) -> float:
    """The last number of a text as a confidence in [0, 1]; NaN if there is none, or if it is outside [0, 1].

    Args:
        text: of any length.
        scale: what a number is divided by, if it is neither a percentage nor a fraction.
    """
    number = final_answer(text, "last_number") or ""
    value = as_number(number)
    if value is None:
        return math.nan
    share = value if set("/%") & set(number) else value / Fraction(scale)
    return float(share) if 0 <= share <= 1 else math.nan
