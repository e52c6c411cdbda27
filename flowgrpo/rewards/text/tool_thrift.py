"""A right completion gets more the fewer calls of tools it makes, beside the right completions of its group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..inputs import Inputs
from ..scores import Scores
from ..within import check_inner, inner_reward, inner_servers, score_within, signature_of
from .tool_calls import BEGIN, END, calls_in, check_marks


class ToolThrift:
    """The score of another reward, times a factor that is 1 for the fewest calls among the right ones of the group.

    This is the reward of OTC-GRPO (arXiv 2504.14870). With m calls, and n the fewest calls of a right completion of the
    group, the factor of a right completion is

        cos(m pi / (2 m + smooth)) for n = 0, which is 1 for m = 0
        sin(f pi / (2 n)) with f = 2 n m / (m + n) otherwise

    The factor is 1 for m = n and falls with m. A completion that is not right keeps the score of the other reward.

    Args:
        correct: name of the reward that tells right from wrong, as in a recipe.
        correct_options: options of that reward.
        threshold: a completion is right if that reward gives at least this score.
        begin: text that begins a call, as in rollout.form.
        end: text that ends a call, as in rollout.form.
        smooth: how slowly the factor falls where a right completion needs no call.
        scale: the factor of a right completion is multiplied by this.

    Raises:
        ValueError: an option is wrong, or the reward `correct` cannot be made.
        MissingDependency: the reward `correct` needs a package that is not installed.
    """

    name = "tool_thrift"
    whole_group = True

    def __init__(
        self,
        correct: str = "answer",
        correct_options: Mapping[str, Any] | None = None,
        threshold: float = 1.0,
        begin: str = BEGIN,
        end: str = END,
        smooth: float = 1.0,
        scale: float = 1.0,
    ) -> None:
        check_marks(self.name, begin, end)
        for option, value in (("smooth", smooth), ("scale", scale)):
            known = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not known or not 0 < value < math.inf:
                raise ValueError(f"{self.name}: {option} is {value!r}; give a number above 0")
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not math.isfinite(threshold):
            raise ValueError(f"{self.name}: threshold is {threshold!r}; give a number")
        self.threshold, self.begin, self.end, self.smooth, self.scale = threshold, begin, end, smooth, scale
        self.correct = inner_reward(self.name, "correct", correct, correct_options)
        self.remote = self.correct.remote
        # A failed call of a remote reward is repeated as a whole, so each call has one group only.
        self.batch_size = 1 if self.remote else None
        self.__signature__ = signature_of("prompts", "completions", "groups", *self.correct.needed)

    @staticmethod
    def check_options(name: str, options: Mapping[str, Any]) -> None:
        """Refuse a reward for `correct` that cannot be made.

        Raises:
            ValueError: its name or one of its options is wrong.
        """
        check_inner(name, "correct", options.get("correct", "answer"), options.get("correct_options"))

    @staticmethod
    def served_at(options: Mapping[str, Any]) -> list[str]:
        """The servers that the reward for `correct` asks, in words."""
        return inner_servers(options.get("correct", "answer"), options.get("correct_options"))

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], groups: Sequence[int], **columns: Any
    ) -> Scores:
        """Score completions.

        Args:
            completions: B strings.
            prompts: B strings.
            groups: B group ids, in any order.
            columns: name -> B values, for the reward `correct`.

        Returns:
            Scores with B values, NaN where `correct` gives no score. The sub-scores are the sub-scores of `correct`,
            its score as `correct`, and the number of calls as `calls`.
        """
        inputs = Inputs(list(completions), list(prompts), columns, list(groups))
        scored = score_within(self.correct, inputs, "reward `correct`")
        given = scored.values.tolist()
        calls = [len(calls_in(text, self.begin, self.end)) for text in completions]
        right = [value >= self.threshold for value in given]
        fewest: dict[int, int] = {}
        for group, count, good in zip(groups, calls, right, strict=True):
            if good:
                fewest[group] = min(count, fewest.get(group, count))
        values = [
            value * self.scale * efficiency(count, fewest[group], self.smooth) if good else value
            for value, count, group, good in zip(given, calls, groups, right)
        ]
        subs = {**scored.sub_scores, "correct": given, "calls": [float(count) for count in calls]}
        return Scores(values, subs, scored.notes, answers=scored.answers, rendered=scored.rendered)

    def close(self) -> None:
        """Close the reward `correct`."""
        self.correct.close()


def efficiency(calls: int, fewest: int, smooth: float) -> float:
    """The factor of a right completion with `calls` calls, where `fewest` would do; in [0, 1]."""
    if fewest == 0:
        return math.cos(calls * math.pi / (2 * calls + smooth))
    return math.sin(math.pi * calls / (calls + fewest))
