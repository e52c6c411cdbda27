"""The most frequent answer of the group as the label: a reward for data without reference answers.

MM-UPT, "Unsupervised Post-Training for Multi-Modal LLM Reasoning via GRPO" (arXiv 2505.22453); TTRL (arXiv 2504.16084).
With `share`, EMPO, "Right Question is Already Half the Answer" (arXiv 2504.05812).
This reward makes a model more certain of the answer that it already gives most often, even if that answer is wrong. So
watch an evaluation with reference answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from ..options import check_flag
from ..scores import Scores
from .answer import check_rule, compared, note
from .extraction import canonical, final_answer


class Majority:
    """1 if the final answer is the most frequent one of the group, else 0. Needs no reference answers.

    With `share`, the value is the share of the group that gives the same answer. Its mean over the group rises as the
    entropy of the answers falls (EMPO).

    Answers are found and compared in the same way as by the reward `answer`. If several answers are equally frequent,
    each of them is right, so the result does not depend on an order. Nothing is learned from a group in which all
    answers differ. A completion without an answer gets 0 and has no vote.

    Args:
        extract: what counts as the answer in a completion without box and tag, see `answer`.
        least: smallest share of the group's completions, in [0, 1], that must give the most frequent answer. A group
            with a smaller share gets NaN.
        share: if true, the value is the share of the group that gives the same answer, in [0, 1].
        alike: two answers that are texts count as the same if at least this share of their words is common: the words
            of both, divided by the words of either. 1 compares whole answers. Answers also count as the same if a
            chain of answers that are alike links them. Numbers are always compared exactly.

    Raises:
        ValueError: an option is wrong.
    """

    name = "majority"
    whole_group = True

    def __init__(self, extract: str = "whole", least: float = 0.0, share: bool = False, alike: float = 1.0) -> None:
        check_rule(self.name, extract)
        check_flag(self.name, "share", share)
        for name, value in (("least", least), ("alike", alike)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ValueError(f"majority: {name} is {value!r}; give a share from 0 to 1, such as 0.5")
        self.extract, self.least, self.share, self.alike = extract, least, share, alike

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], groups: Sequence[int]) -> Scores:
        """Let the completions of each group vote.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            groups: B group ids, in any order.

        Returns:
            Scores with B values: 0 or 1, or with `share` a share, and NaN if no answer of the group is frequent
            enough. Sub-score `votes`: the share of the group that gives the same answer. Notes are the answers as they
            were written; `answers` are the answers as they were compared. Answers that are alike have one such answer.
        """
        found = [final_answer(text, self.extract) for text in completions]
        keys = [None if answer is None else canonical(answer) for answer in found]
        compared_as = [compared(answer) for answer in found]
        if self.alike < 1:
            keys = self._joined(keys, groups)
            compared_as = [None if key is None else str(key) for key in keys]
        sizes = Counter(groups)
        votes: dict[int, Counter[Fraction | str]] = {group: Counter() for group in sizes}
        for group, key in zip(groups, keys, strict=True):
            if key is not None:
                votes[group][key] += 1
        values, shares = [], []
        for group, key in zip(groups, keys, strict=True):
            most = max(votes[group].values(), default=0)
            mine = 0 if key is None else votes[group][key]
            # 7 of 25 is a share of 0.28, and the product 0.28 × 25 is rounded to more than 7.
            decided = most > 0 and most >= self.least * sizes[group] - 1e-9
            shares.append(mine / sizes[group])
            value = shares[-1] if self.share else float(mine == most)
            values.append(value if decided else math.nan)
        return Scores(values, {"votes": shares}, [note(answer) for answer in found], answers=compared_as)

    def _joined(self, keys: Sequence[Fraction | str | None], groups: Sequence[int]) -> list[Fraction | str | None]:
        """Answers, each replaced by the first in the alphabet of the answers of its group that are like it."""
        texts: dict[int, dict[str, None]] = {}
        for key, group in zip(keys, groups, strict=True):
            if isinstance(key, str):
                texts.setdefault(group, {})[key] = None
        names = {group: clusters(sorted(own), self.alike) for group, own in texts.items()}
        return [names[group][key] if isinstance(key, str) else key for key, group in zip(keys, groups)]


def clusters(texts: Sequence[str], alike: float) -> dict[str, str]:
    """The first text of the cluster of each text. A chain of texts that are alike is a cluster.

    Args:
        texts: different texts. The time grows with the square of their number.
        alike: two texts are alike if at least this share of their words, in [0, 1], is common to both.
    """
    words = {text: set(text.split()) for text in texts}
    name: dict[str, str] = {}
    for first in texts:
        if first in name:
            continue
        name[first], open_ones = first, [first]
        while open_ones:
            own = words[open_ones.pop()]
            near = [
                text for text in texts
                if text not in name and len(own & words[text]) >= alike * len(own | words[text])
            ]  # fmt: skip
            name.update(dict.fromkeys(near, first))
            open_ones += near
    return name
