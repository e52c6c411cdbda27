"""A bounded term that is added to advantages."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ...core.bounded_terms import bounded_shaping
from ...parts.needs import Need, needs
from ...parts.ranges import Given
from ..credit.pooling import Batch
from ..credit.strata import signal_values
from .extension import CREDIT, Comparison, Extension, Rewards
from .rules import names_a_reward


@needs(names_a_reward, Need(CREDIT, ("leaf",), "changes the advantages of samples, not of steps"))
class Shaping(Extension):
    """Adds a reward or a sub-score to advantages, bounded so that no advantage changes its sign (ASPO, 2508.19201).

    The result is A + strength (s − mean of s in the group), within `bound` |A| of A. A is the advantage, and s is the
    reward or the sub-score.

    Args:
        reward: Label (or name) of a reward; with `weight: 0` the reward serves this extension only.
        sub_score: One of its sub-scores; the reward itself if left out.
        strength: Factor of the signal; below 0, a smaller signal is better.
        bound: Largest change, as a share of the advantage.
    """

    def __init__(
        self,
        *,
        reward: str,
        sub_score: str | None = None,
        strength: float = 1.0,
        bound: Annotated[float, Field(ge=0, lt=1)] = 0.5,
        rewards: Given[Rewards],
    ) -> None:
        self.reward, self.sub_score = rewards.reported(reward), sub_score
        self.strength, self.bound = strength, bound
        self.column = f"shaping/{self.reward}/{sub_score or ''}"

    def samples_scored(self, batch: Batch) -> Batch:
        """Share the signal; raises ValueError if the reward does not give the sub-score."""
        batch.columns[self.column] = signal_values(batch.scores, self.reward, self.sub_score, "extension shaping")
        return batch

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """Add the signal."""
        signal = torch.tensor(comparison.samples.columns[self.column], dtype=torch.float64)
        return bounded_shaping(
            advantages, signal, comparison.samples.groups, strength=self.strength, bound=self.bound
        )  # fmt: skip
