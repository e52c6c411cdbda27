"""Coefficients of an objective that follow what its updates measure, from one iteration to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..configs.schema import ObjectiveConfig, TextObjectiveConfig
from ..core.controllers import SetPoint, entropy_bonus, variance_dual
from .checkpoint import Stateful

METRICS = {"entropy": ("exact_entropy", "entropy_bonus"), "variance": ("ratio_variance", "variance_price")}
"""Of each coefficient the metric that it follows, and the one that it is."""


class Controls:
    """The coefficients that an objective's recipe holds at a target.

    Args:
        objective: of the recipe.

    Attributes:
        entropy: of a bonus of entropy; None without it.
        variance: price of the ratio's variance; None without it.
    """

    def __init__(self, objective: ObjectiveConfig | TextObjectiveConfig) -> None:
        self.entropy: SetPoint | None = None
        self.variance: SetPoint | None = None
        if isinstance(objective, TextObjectiveConfig) and (bonus := objective.entropy) is not None:
            self.entropy = entropy_bonus(bonus.target, value=bonus.value, rate=bonus.rate, high=bonus.high)
        if (dual := objective.variance) is not None:
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
