"""Coefficients of an objective that change between iterations, most of them so that a metric stays at its target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..configs.sections import EntropyConfig, VarianceConfig
from ..core.controllers import SetPoint, entropy_bonus, variance_dual
from ..parts.choice import Choice
from ..parts.needs import Rule, without_effect

if TYPE_CHECKING:
    from .folder.checkpoint import Stateful

METRICS = {"entropy": ("exact_entropy", "entropy_bonus"), "variance": ("ratio_variance", "variance_price")}
"""Coefficient -> the metric that moves the coefficient, and the metric that reports the coefficient."""


class Controls:
    """The coefficients of an objective that follow a metric.

    Args:
        entropy: how the entropy bonus moves, or its coefficient; None for no bonus.
        variance: how the price of the ratio's variance moves; None for a fixed price.

    Attributes:
        entropy: the coefficient of the entropy bonus; None for no bonus.
        variance: the price of the ratio's variance; None for a fixed price.
    """

    def __init__(self, entropy: EntropyConfig | None = None, variance: VarianceConfig | None = None) -> None:
        self.entropy: SetPoint | None = None
        self.variance: SetPoint | None = None
        if (bonus := entropy) is not None:
            high = bonus.value if bonus.target is None else bonus.high
            self.entropy = entropy_bonus(bonus.target or 0.0, value=bonus.value, rate=bonus.rate, high=high)
        self._steady = entropy is not None and entropy.target is None
        if (dual := variance) is not None:
            high = math.inf if dual.high is None else dual.high
            self.variance = variance_dual(dual.target, value=dual.value, rate=dual.rate, high=high)

    def follow(self, entropy: EntropyConfig | None) -> None:
        """Take what a schedule moves: the target of the entropy, or the coefficient of a bonus without a target."""
        if self.entropy is None or entropy is None:
            return
        if entropy.target is None:
            self.entropy.value = entropy.value
        else:
            self.entropy.target = entropy.target

    def parts(self) -> dict[str, Stateful]:
        """The coefficients that a checkpoint holds, by file name."""
        named = {"entropy": None if self._steady else self.entropy, "variance": self.variance}
        return {name: point for name, point in named.items() if point is not None}

    def settle(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Move the coefficients by the metrics of an update, and return the values that the update used."""
        used = {}
        for name, point in (("entropy", self.entropy), ("variance", self.variance)):
            if point is None:
                continue
            follows, metric = METRICS[name]
            used[metric], measured = point.value, record.get(follows)
            if name == "entropy" and self._steady:
                continue
            point.update(math.nan if measured is None else measured)
        return used


def moves(option: str, surrogate: str, setting: str, *moved: str) -> Rule:
    """A rule for an option of the objective that moves a setting of its surrogate at each optimizer step.

    Args:
        option: name of the objective's option.
        surrogate: name of the surrogate that has the setting.
        setting: the setting in words, for messages.
        moved: the surrogate's options that the objective's option moves.
    """

    def rule(recipe: Any, choice: Choice) -> list[str]:
        if choice.get(option) is None:
            return []
        faults = []
        if recipe.optimizer.updates * recipe.optimizer.epochs == 1:
            faults.append(
                f"objective.{option} compares with the policy that sampled, which one optimizer step per rollout never "
                "leaves; use optimizer.updates or epochs above 1, or leave it out"
            )
        if choice["surrogate"].name != surrogate:
            faults.append(
                f"objective.{option} moves {setting} of surrogate {surrogate}, not of {choice['surrogate'].short}; use "
                f"{surrogate}, or leave it out"
            )
            return faults
        why = f"objective.{option} finds {setting} by itself"
        return faults + [fault for one in moved if (fault := without_effect(choice["surrogate"], one, why))]

    return rule
