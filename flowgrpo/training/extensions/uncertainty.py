"""Smaller advantages where the samples of a prompt disagree."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...core.outcomes import semantic_entropy_weights
from ...parts.choice import Choice
from ...parts.needs import needs
from ...parts.ranges import Given, NotNegative
from ..credit.pooling import Batch, Pooled
from ..reported import answers_of
from .extension import Extension, Rewards
from .rules import names_a_reward, once

ANSWERS = "uncertainty/answers"


def _keeps_signs(recipe: Any, choice: Choice) -> list[str]:
    if choice["form"] == "linear" and choice["alpha"] > 1:
        alpha = choice["alpha"]
        return [f"extension uncertainty: alpha is {alpha:g} with form linear, which would flip signs; use 1 at most"]
    return []


@needs(once, names_a_reward, _keeps_signs)
class Uncertainty(Extension):
    """Makes advantages smaller where the answers that a reward reads in the samples of a prompt disagree.

    Advantages are multiplied by a factor (SEED-GRPO, 2505.12346). The factor is 1 where all answers are equal, and
    falls with the entropy x of the answers. The entropy is scaled to 1 where no two answers are equal.

    Args:
        reward: Label (or name) of a reward that gives answers; it may have `weight: 0`.
        form: The factor: `linear` is 1 − alpha x, `exponential` is exp(−alpha x).
        alpha: How fast the factor falls. With `linear` it is at most 1; with 1, a group without two equal answers does
            not count.
    """

    def __init__(
        self,
        *,
        reward: str,
        form: Literal["linear", "exponential"] = "linear",
        alpha: NotNegative = 0.5,
        rewards: Given[Rewards],
    ) -> None:
        self.reward, self.form, self.alpha = rewards.reported(reward), form, alpha
        self._mean: float | None = None

    def samples_scored(self, batch: Batch) -> Batch:
        """Share the answers; raises ValueError if the reward gives none."""
        batch.columns[ANSWERS] = answers_of(batch.scores, self.reward, "extension uncertainty")
        return batch

    def certainty(self, samples: Pooled) -> Tensor:
        """[L] factors of advantages in [0, 1], small where the answers of a group disagree.

        Samples that are not results do not count, and samples without an answer do not count.
        """
        answers = samples.columns[ANSWERS]
        read = torch.tensor([answer is not None for answer in answers])
        names: dict[str | None, int] = {}
        ids = [names.setdefault(answer, len(names)) for answer in answers]
        return semantic_entropy_weights(
            ids, samples.groups, alpha=self.alpha, form=self.form, valid=read & samples.outcomes
        )

    def advantages_made(self, advantages: Tensor, samples: Pooled, batch: Batch) -> Tensor:
        """Multiply by the certainty of the samples that each node leads to."""
        certainty = self.certainty(samples)
        self._mean = float(certainty.mean())
        factor = batch.experience.node_advantages(certainty[samples.mine]).nan_to_num()
        return advantages * (factor if advantages.ndim == 1 else factor[:, None])

    def record(self) -> dict[str, float]:
        """The mean factor."""
        return {} if self._mean is None else {"certainty": self._mean}
