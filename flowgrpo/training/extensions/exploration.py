"""More exploration where prompts are hard, and less where they are easy."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ...core.bounded_terms import bounded_shaping
from ...core.ease import group_ease
from ...core.entropy_guided import uncertain_windows
from ...parts.needs import Need, needs, one_round
from ...parts.ranges import Count, NotNegative
from ..credit.combining import total_reward
from ..credit.pooling import Batch
from ..text.text_objective import statistics_of
from .extension import CREDIT, Comparison
from .measured import MeasuredByPolicy
from .rules import once


@needs(
    once, Need("task", ("text",), "reads the entropy of tokens"), one_round("reads the entropy of completions"),
    Need(CREDIT, ("leaf",), "changes the advantages of samples, not of steps"),
)  # fmt: skip
class Exploration(MeasuredByPolicy):
    """Adds to advantages how much a completion explored, with the sign of the prompt's difficulty (ARES, 2510.08457).

    A token is a trigger of exploration if the mean entropy of a window that begins at it is above a threshold, as for
    penalty `window_kl`. Let n be the share of triggers among the tokens of a completion, and u the ease of its prompt,
    the mean weighted sum of rewards within 0 and 1. The advantage becomes A + strength (1 − 2 u) (n − mean of n in the
    group), within `bound` |A| of A. So exploration gains where the policy fails, and costs where it succeeds. The
    entropies take another pass over the completions.

    Args:
        window: Tokens of a window.
        threshold: Mean entropy in nats above which a token is a trigger.
        strength: Factor of what is added.
        bound: Largest change, as a share of the advantage.
    """

    column, metric = "exploration/triggers", "triggers"

    def __init__(
        self,
        *,
        window: Count = 4,
        threshold: NotNegative = 1.0,
        strength: NotNegative = 1.0,
        bound: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    ) -> None:
        self.window, self.threshold, self.strength, self.bound = window, threshold, strength, bound

    def measured(self, batch: Batch) -> list[float]:
        """[B] the share of triggers among the tokens that the policy drew of each completion."""
        found = [0.0] * len(batch.experience.samples)
        for rows, statistics in statistics_of(self.policy, batch.experience, entropy=True):
            own = batch.experience.trained(rows).to(self.policy.device)
            assert statistics.entropy is not None
            trigger = uncertain_windows(statistics.entropy, own, self.window, self.threshold)
            shares = trigger.sum(1) / own.sum(1).clamp(min=1)
            for row, share in zip(rows, shares.tolist()):
                found[row] = share
        return found

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """Add how much each completion explored."""
        samples = comparison.samples
        ease = group_ease(total_reward(comparison.scores, samples), samples.groups)
        signal = (1 - 2 * ease) * torch.tensor(samples.columns[self.column], dtype=ease.dtype)
        return bounded_shaping(advantages, signal, samples.groups, strength=self.strength, bound=self.bound)
