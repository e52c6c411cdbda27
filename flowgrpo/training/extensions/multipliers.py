"""Dual ascent finds the weights of rewards whose mean must reach a value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.combination import Multipliers, constrained_advantages
from ...parts.choice import Choice
from ...parts.needs import Need, needs
from ...parts.ranges import Given, NotNegative, Positive
from ...parts.traits import offers
from ..credit.combining import counted_rewards
from .extension import CREDIT, Comparison, Extension, Rewards
from .rules import once


def _aim_and_constraints(recipe: Any, choice: Choice) -> list[str]:
    counted = {reward.label or reward.name: reward for reward in counted_rewards(recipe.rewards)}
    constrained = [label for label, reward in counted.items() if reward.at_least is not None]
    faults = []
    if not constrained:
        faults.append(
            "extension multipliers finds the weights of rewards with `at_least`, and no reward has `at_least`; set it, "
            "or leave the extension out"
        )
    elif len(constrained) == len(counted):
        faults.append(
            f"every reward that counts has `at_least` ({', '.join(constrained)}); leave `at_least` out of one reward, "
            "as the aim"
        )
    if choice["initial"] > choice["maximum"]:
        faults.append(
            f"extension multipliers: initial is {choice['initial']:g}, above maximum, {choice['maximum']:g}; use a "
            "smaller initial or a larger maximum"
        )
    return faults


@offers("multipliers", "memory")
@needs(
    once,
    _aim_and_constraints,
    Need("advantage", ("group",), "normalises each reward by itself"),
    Need("combine", ("sum",), "normalises each reward by itself"),
    Need("advantage.baseline", ("mean",), "compares each reward with its mean in the group"),
    Need(CREDIT, ("leaf",), "changes the advantages of samples, not of steps"),
)
class ConstraintMultipliers(Extension):
    """Dual ascent on the weights of rewards with `at_least` (Faithful GRPO, 2604.08476).

    A weight grows while the mean of its reward is below `at_least`, and falls while it is above.

    Args:
        rate: Change of a weight per unit of the difference between `at_least` and the mean.
        initial: Weights at the start.
        maximum: Largest weight.
    """

    def __init__(
        self,
        *,
        rate: Positive = 0.05,
        initial: NotNegative = 0.0,
        maximum: NotNegative = 10.0,
        rewards: Given[Rewards],
    ) -> None:
        entries = counted_rewards(rewards.entries)
        wanted = {k: entry.at_least for k, entry in enumerate(entries) if entry.at_least is not None}
        self.columns = list(wanted)
        self.labels = [entries[k].label or entries[k].name for k in self.columns]
        self.multipliers = Multipliers(list(wanted.values()), rate=rate, initial=initial, maximum=maximum)

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """Add each constraint with its multiplier to the advantages of the aim, and move the multipliers."""
        values = comparison.scores.values.masked_fill(~comparison.samples.outcomes[:, None], torch.nan)
        each = [comparison.compare(values[:, k]) for k in self.columns]
        found = constrained_advantages(advantages, torch.stack(each, 1), self.multipliers.values)
        self.multipliers.step(values[:, self.columns])
        return found

    def record(self) -> dict[str, float]:
        """The multipliers after this iteration."""
        return {f"multiplier/{label}": v for label, v in zip(self.labels, self.multipliers.values.tolist())}

    def state_dict(self) -> dict[str, Any]:
        """The multipliers."""
        return dict(self.multipliers.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state."""
        self.multipliers.load_state_dict(state)
