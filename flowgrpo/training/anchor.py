"""The reference that follows the policy: every so many steps, or as soon as the policy is far from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..configs.image_recipe import ReferenceConfig
from ..configs.schema import AnyRecipe
from ..parts.traits import measured_distance
from ..weights.averages import Ema
from ..weights.trained import TrainedWeights

MOVED = "reference/moved"


class Anchor(Ema):
    """The average with which penalties compare, with a bound of its distance from the weights (GARDO, 2512.24138).

    Args:
        weights: the trained weights.
        recipe: its penalties measure the distance.
        settings: of the reference.
    """

    def __init__(self, weights: TrainedWeights, recipe: AnyRecipe, settings: ReferenceConfig) -> None:
        super().__init__(weights, **settings.model_dump(exclude={"above"}))
        self.above, self.metric = settings.above, measured_distance(recipe)

    def settle(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Become the weights if the updates of an iteration have measured more than the bound.

        Args:
            record: the metrics of the updates, the same on every process.

        Returns:
            Whether it has become the weights, as a metric; nothing without a bound.
        """
        if self.above is None or self.metric is None:
            return {}
        far = (record.get(self.metric) or 0.0) > self.above
        if far:
            self.begin_anew()
        return {MOVED: float(far)}
