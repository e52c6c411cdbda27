"""`flowgrpo rewards compare`: how far rewards agree on a folder of pictures, and where they differ most."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ..rewards.base import RewardSpec
from .findings import finite
from .folder import LabelledPicture, materials
from .material import groups_of
from .spread import correlations, describe, order_kept, within_spread
from .trial import Trial


@dataclass(frozen=True)
class RewardComparison:
    """Scores of B pictures by several rewards.

    Attributes:
        scores: reward -> [B] float64, NaN where it does not apply.
        files: B paths.
        prompts: B prompts.
        groups: B group ids, by equal prompts; all in one group if no prompt comes twice.
        grouping: how the groups were made, in words.
    """

    scores: dict[str, Tensor]
    files: list[str]
    prompts: list[str]
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
        """Agreement of every two rewards: Pearson's and Spearman's correlation, and the share of the pairs within a
        group that both rewards order alike. An undefined number is None."""
        rows = []
        for first, second in combinations(self.scores, 2):
            one, other = self.scores[first], self.scores[second]
            pearson, spearman = correlations(one, other)
            kept = order_kept(one, other, self.groups)
            rows.append(
                {
                    "rewards": [first, second],
                    "pearson": finite(pearson),
                    "spearman": finite(spearman),
                    "order_within": finite(kept),
                    "both": int((~(one.isnan() | other.isnan())).sum()),
                }
            )
        return rows

    def differences(self, first: str, second: str, most: int) -> list[dict[str, Any]]:
        """The pictures on which two rewards differ most, by the advantages that each would give."""
        one, other = self.standing(first), self.standing(second)
        gaps = (one - other).nan_to_num(nan=0.0)
        found = []
        for row in gaps.abs().argsort(descending=True, stable=True)[:most].tolist():
            if gaps[row] == 0:
                break
            found.append(
                {
                    "file": self.files[row],
                    "prompt": self.prompts[row],
                    "scores": {name: finite(self.scores[name][row].item()) for name in (first, second)},
                    "advantages": {first: finite(one[row].item()), second: finite(other[row].item())},
                }
            )
        return found

    def text(self, most: int) -> str:
        """The comparison as text."""
        lines = [f"{len(self.files)} pictures, {self.grouping}"]
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
                f"{_share(row['order_within'])} of the pairs of a group in the same order (50% is chance)"
            )
            for item in self.differences(first, second, most):
                told = ", ".join(
                    f"{name} {_number(item['scores'][name], '.4g')} (advantage {item['advantages'][name]:+.2f})"
                    for name in (first, second)
                )
                lines.append(f"  {item['file']}  {told}  {item['prompt']}")
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
            "pictures": [
                {
                    "file": self.files[row],
                    "prompt": self.prompts[row],
                    "scores": {name: finite(values[row].item()) for name, values in self.scores.items()},
                }
                for row in range(len(self.files))
            ],
        }
        return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def compare_rewards(specs: Sequence[RewardSpec], pictures: Sequence[LabelledPicture]) -> RewardComparison:
    """Score pictures with several rewards.

    Pictures of one size are scored together, about 64 at a time; a prompt's pictures of one size stay together.

    Raises:
        ValueError: there are fewer than two rewards, two share a name, one cannot be made or fails, or needs a column
            that the pictures lack.
        MissingDependency: a reward needs a package that is not installed.
    """
    if len(specs) < 2:
        raise ValueError("name two rewards or more to compare")
    trials: list[Trial] = []
    try:
        for spec in specs:
            trials.append(Trial(spec, "images"))
        names = [trial.name for trial in trials]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two rewards are called {twice[0]!r}; write one as {{name: {twice[0]}, label: other}}")
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        files: list[str] = []
        prompts: list[str] = []
        for material in materials(list(pictures)):
            files, prompts = files + material.labels, prompts + material.prompts
            for trial in trials:
                trial.require_columns(material)
                scored = trial.score(material)
                if scored.failed:
                    raise ValueError(f"reward {trial.name!r} fails on {material.source}: {scored.failure}")
                parts[trial.name].append(scored.values)
    finally:
        for trial in trials:
            trial.close()
    groups, grouping = groups_of(prompts)
    return RewardComparison({name: torch.cat(part) for name, part in parts.items()}, files, prompts, groups, grouping)


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
