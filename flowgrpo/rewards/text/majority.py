"""The most frequent answer of the group as the label: a reward for data without reference answers.

MM-UPT, "Unsupervised Post-Training for Multi-Modal LLM Reasoning via GRPO" (arXiv 2505.22453); TTRL (arXiv 2504.16084).
This reward makes a model more certain of the answer that it already gives most often, even if that answer is wrong. So
watch an evaluation with reference answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from ..scores import Scores
from .answer import check_rule, compared, note
from .extraction import canonical, final_answer


class Majority:
    """1 if the final answer is the most frequent one of the group, else 0. Needs no reference answers.

    Answers are found and compared in the same way as by the reward `answer`. If several answers are equally frequent,
    each of them is right, so the result does not depend on an order. Nothing is learned from a group in which all
    answers differ. A completion without an answer gets 0 and has no vote.

    Args:
        extract: what counts as the answer in a completion without box and tag, see `answer`.
        least: smallest share of the group's completions, in [0, 1], that must give the most frequent answer. A group
            with a smaller share gets NaN.

    Raises:
        ValueError: an option is wrong.
    """

    name = "majority"
    whole_group = True

    def __init__(self, extract: str = "whole", least: float = 0.0) -> None:
        check_rule(self.name, extract)
        if isinstance(least, bool) or not isinstance(least, (int, float)) or not 0 <= least <= 1:
            raise ValueError(f"majority: least is {least!r}; give a share from 0 to 1, such as 0.5")
        self.extract, self.least = extract, least

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], groups: Sequence[int]) -> Scores:
        """Let the completions of each group vote.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            groups: B group ids, in any order.

        Returns:
            Scores with B values: 0, 1, or NaN if no answer of the group is frequent enough. Sub-score `votes`: the
            share of the group that gives the same answer. Notes are the answers as they were written; `answers` are the
            answers as they were compared.
        """
        found = [final_answer(text, self.extract) for text in completions]
        keys = [None if answer is None else canonical(answer) for answer in found]
        sizes = Counter(groups)
        votes: dict[int, Counter[Fraction | str]] = {group: Counter() for group in sizes}
        for group, key in zip(groups, keys, strict=True):
            if key is not None:
                votes[group][key] += 1
        values, shares = [], []
        for group, key in zip(groups, keys, strict=True):
            most = max(votes[group].values(), default=0)
            mine = 0 if key is None else votes[group][key]
            decided = most > 0 and most >= self.least * sizes[group]
            values.append(float(mine == most) if decided else math.nan)
            shares.append(mine / sizes[group])
        notes, answers = [note(answer) for answer in found], [compared(answer) for answer in found]
        return Scores(values, {"votes": shares}, notes, answers=answers)
