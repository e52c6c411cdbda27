"""The group's most frequent answer as the label: a reward for data without answers.

MM-UPT, "Unsupervised Post-Training for Multi-Modal LLM Reasoning via GRPO" (arXiv 2505.22453); TTRL (arXiv
2504.16084). It makes a model surer of what it mostly answers already, right or not: watch a labelled evaluation.
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
    """The final answer is the most frequent one of the group: 1, else 0; needs no label.

    Answers are found and compared as by the reward `answer`. Where several are equally frequent, each of them is
    right, so the result does not depend on an order; a group in which all answers differ learns nothing. A
    completion without an answer gets 0 and has no vote.

    Args:
        extract: what counts as the answer of a completion without box and tag, see `answer`.
        least: share of the group's completions, in [0, 1], that the most frequent answer needs; a group in which it
            has fewer gets NaN.

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
        """Vote within groups.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            groups: B group ids, in any order.

        Returns:
            Scores with B values, 0, 1, or NaN where the group has no answer that is frequent enough. Sub-score
            `votes`: the share of the group that gives the same answer. Notes are the answers as they were
            written, `answers` as they were compared.
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
