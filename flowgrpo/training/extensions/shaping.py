"""A bounded term that is added to advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.bounded_terms import bounded_shaping
from ...parts.needs import Need, needs
from ...parts.ranges import Given
from ..credit.pooling import Batch
from ..credit.strata import signal_values
from .extension import CREDIT, Comparison, Extension, names_a_reward, reported


@needs(names_a_reward, Need(CREDIT, ("leaf",), "bends the advantages of samples, not of steps"))
class Shaping(Extension):
    """What a reward or a sub-score says is added to advantages, too little to turn the sign of one (ASPO, 2508.19201).

    A + strength (s − mean of s in the group), within `bound` |A| of A.

    Args:
        reward: Label (or name) of a reward; with `weight: 0` it does this and nothing else.
        sub_score: One of its sub-scores; the reward itself if left out.
        strength: Below 0, less of it is better.
        bound: Largest change, as a share of the advantage.
    """

    def __init__(
        self,
        *,
        reward: str,
        sub_score: str | None = None,
        strength: float = 1.0,
        bound: Annotated[float, Field(ge=0, lt=1)] = 0.5,
        recipe: Given[Any],
        trained: Given[Sequence[str]],
    ) -> None:
        self.reward, self.sub_score = reported(recipe, trained, reward), sub_score
        self.strength, self.bound = strength, bound
        self.column = f"shaping/{self.reward}/{sub_score or ''}"

    def samples_scored(self, batch: Batch) -> Batch:
        """Share the signal; raises ValueError for a sub-score that the reward does not give."""
        batch.columns[self.column] = signal_values(batch.scores, self.reward, self.sub_score, "extension shaping")
        return batch

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """Add the signal."""
        signal = torch.tensor(comparison.samples.columns[self.column], dtype=torch.float64)
        return bounded_shaping(
            advantages, signal, comparison.samples.groups, strength=self.strength, bound=self.bound
        )  # fmt: skip
