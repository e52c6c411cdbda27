"""Coefficients of an objective that follow what its updates measure, from one iteration to the next."""

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
"""Of each coefficient the metric that it follows, and the one that it is."""


class Controls:
    """The coefficients that an objective holds at a target.

    Args:
        entropy: how a bonus of entropy moves; there is none without it.
        variance: how the price of the ratio's variance moves; it does not without it.

    Attributes:
        entropy: of a bonus of entropy; None without it.
        variance: price of the ratio's variance; None without it.
    """

    def __init__(self, entropy: EntropyConfig | None = None, variance: VarianceConfig | None = None) -> None:
        self.entropy: SetPoint | None = None
        self.variance: SetPoint | None = None
        if (bonus := entropy) is not None:
            self.entropy = entropy_bonus(bonus.target, value=bonus.value, rate=bonus.rate, high=bonus.high)
        if (dual := variance) is not None:
            high = math.inf if dual.high is None else dual.high
            self.variance = variance_dual(dual.target, value=dual.value, rate=dual.rate, high=high)

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds, by file name."""
        named = {"entropy": self.entropy, "variance": self.variance}
        return {name: point for name, point in named.items() if point is not None}

    def settle(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Move them by the metrics of an update; what they were in it."""
        used = {}
        for name, point in (("entropy", self.entropy), ("variance", self.variance)):
            if point is None:
                continue
            follows, metric = METRICS[name]
            used[metric], measured = point.value, record.get(follows)
            point.update(math.nan if measured is None else measured)
        return used


def moves(option: str, surrogate: str, setting: str, *moved: str) -> Rule:
    """A rule for an option that moves a setting of a surrogate from one optimizer step to the next.

    Args:
        option: of the objective.
        surrogate: whose setting it is.
        setting: in words.
        moved: options of the surrogate that are moved.
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
