"""`flowgrpo rewards compare`: how far rewards agree on samples that exist already, and where they differ most."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from ..inference.image_samples import silent
from ..rewards.base import RewardSpec
from .findings import finite
from .given_samples import WORDS, GivenSample, scores_of
from .material import groups_of
from .spread import correlations, describe, order_shared, within_spread

SHOWN = 80
"""Characters of a completion that the text shows; the JSON file has all of it."""


@dataclass(frozen=True)
class RewardComparison:
    """Scores of B samples by several rewards.

    Attributes:
        scores: reward -> [B] float64, NaN where it does not apply.
        samples: B samples.
        groups: B group ids, by equal prompts of one moment of a run; all in one group if no prompt comes twice.
        grouping: how the groups were made, in words.
    """

    scores: dict[str, Tensor]
    samples: Sequence[GivenSample]
    groups: list[int]
    grouping: str

    def standing(self, name: str) -> Tensor:
        """Advantages [B]: each score's distance from the mean of its group, divided by the spread within groups."""
        values, spread = self.scores[name], within_spread(self.scores[name], self.groups)
        found = torch.full_like(values, math.nan)
        for group in set(self.groups):
            rows = [row for row, other in enumerate(self.groups) if other == group]
            found[rows] = values[rows] - values[rows].nanmean()
        return found / spread if spread > 0 else found

    def pairs(self) -> list[dict[str, Any]]:
        """Agreement of every two rewards: Pearson's and Spearman's correlation, and of the pairs within a group that
        both rewards tell apart, the number and the share in equal order. An undefined number is None."""
        rows = []
        for first, second in combinations(self.scores, 2):
            one, other = self.scores[first], self.scores[second]
            pearson, spearman = correlations(one, other)
            alike, counted = order_shared(one, other, self.groups)
            rows.append(
                {
                    "rewards": [first, second],
                    "pearson": finite(pearson),
                    "spearman": finite(spearman),
                    "order_within": finite(alike),
                    "pairs_within": counted,
                    "both": int((~(one.isnan() | other.isnan())).sum()),
                }
            )
        return rows

    def differences(self, first: str, second: str, most: int) -> list[dict[str, Any]]:
        """The samples on which two rewards differ most, by the advantages that each would give."""
        one, other = self.standing(first), self.standing(second)
        gaps = (one - other).nan_to_num(nan=0.0)
        found = []
        for row in gaps.abs().argsort(descending=True, stable=True)[:most].tolist():
            if gaps[row] == 0:
                break
            found.append(
                {
                    **self.samples[row].shown(),
                    "prompt": self.samples[row].prompt,
                    "scores": {name: finite(self.scores[name][row].item()) for name in (first, second)},
                    "advantages": {first: finite(one[row].item()), second: finite(other[row].item())},
                }
            )
        return found

    def text(self, most: int) -> str:
        """The comparison as text."""
        noun = WORDS[type(self.samples[0].made)]
        lines = [f"{len(self.samples)} {noun}, {self.grouping}"]
        for name, values in self.scores.items():
            found = describe(values, self.groups)
            lines.append(
                f"{name}: mean {found.mean:.4g}, std {found.std:.3g}, within groups {found.within:.3g}, "
                f"least {found.low:.4g}, most {found.high:.4g}, {found.absent} NaN"
            )
        for row in self.pairs():
            first, second = row["rewards"]
            lines.append(
                f"\n{first} and {second}: Pearson {_number(row['pearson'])}, Spearman {_number(row['spearman'])}, "
                f"{_share(row['order_within'])} of the {row['pairs_within']} pairs within groups that both tell apart "
                "in the same order (50% is chance)"
            )
            for item in self.differences(first, second, most):
                told = ", ".join(
                    f"{name} {_number(item['scores'][name], '.4g')} (advantage {item['advantages'][name]:+.2f})"
                    for name in (first, second)
                )
                named = item.get("image") or shorten(item["completion"], SHOWN, placeholder=" …")
                lines.append(f"  {named}  {told}  {item['prompt']}")
        return "\n".join(lines)

    def as_json(self, most: int) -> str:
        """Everything, as JSON."""
        pairs = self.pairs()
        for row in pairs:
            first, second = row["rewards"]
            row["differences"] = self.differences(first, second, most)
        record = {
            "grouping": self.grouping,
            "rewards": {
                name: {key: finite(value) for key, value in asdict(describe(values, self.groups)).items()}
                for name, values in self.scores.items()
            },
            "pairs": pairs,
            "samples": [
                {
                    **sample.shown(),
                    "prompt": sample.prompt,
                    "scores": {name: finite(values[row].item()) for name, values in self.scores.items()},
                }
                for row, sample in enumerate(self.samples)
            ],
        }
        return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def compare_rewards(
    specs: Sequence[RewardSpec], samples: Sequence[GivenSample], say: Callable[[str], None] = silent
) -> RewardComparison:
    """Score samples with several rewards.

    Args:
        specs: two rewards or more.
        samples: all of them pictures and videos, or all of them completions.
        say: called with lines that say how much is done.

    Raises:
        ValueError: there are fewer than two rewards, two share a name, one cannot be made or does not take the samples,
            or needs a column that they lack.
        RewardError: a reward failed.
        MissingDependency: a reward needs a package that is not installed.
    """
    if len(specs) < 2:
        raise ValueError("name two rewards or more to compare")
    scores = scores_of(specs, samples, say=say)
    groups, grouping = groups_of([sample.group for sample in samples])
    if len(set(groups)) > 1 and len({sample.kind for sample in samples}) > 1:
        grouping = f"{len(set(groups))} groups of one prompt at one moment of the run"
    columns = {name: scores.values[:, k].double() for k, name in enumerate(scores.names)}
    return RewardComparison(columns, samples, groups, grouping)


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
