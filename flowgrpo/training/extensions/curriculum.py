"""Prompts are drawn more often if their rewards vary more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field

from ...core.addressing import address
from ...core.prompt_memory import VarianceCurriculum, answer_diversity
from ...parts.choice import Choice
from ...parts.needs import needs
from ...parts.ranges import Given, Share
from ...parts.section import Section
from ...parts.traits import offers
from ..credit.combining import total_reward
from ..credit.pooling import Batch, Pooled
from ..data import PromptRow
from ..reported import answers_of
from .extension import Extension, Rewards
from .rules import once, unknown_reward

ANSWERS = "curriculum/answers"


class Diversity(Section):
    """How much the samples of a prompt differ, by the answers that a reward reads in them."""

    reward: str = Field(description="Label (or name) of a reward that gives answers; it may have `weight: 0`.")
    weight: float = Field(
        0.25, ge=0, description="What is added if no two answers are equal; 0 is added if all are equal."
    )


def _known(recipe: Any, choice: Choice) -> list[str]:
    chosen = choice["diversity"]
    return [] if chosen is None else unknown_reward(recipe, "extension curriculum (diversity)", chosen.reward)


@offers("memory")
@needs(once, _known)
class Curriculum(Extension):
    """Draws prompts more often if their rewards vary more (MMR1, 2509.21268), instead of in a shuffled order.

    Args:
        decay: Weight of a prompt's past at each new observation of the prompt.
        mix: Share of uniform sampling, so that every prompt can still be drawn.
        diversity: What the variety of answers adds; the variance of rewards alone counts if left out.
    """

    keeps_scores = True

    def __init__(
        self,
        *,
        decay: Share = 0.9,
        mix: Share = 0.5,
        diversity: Diversity | None = None,
        recipe: Given[Any],
        rewards: Given[Rewards],
    ) -> None:
        self.curriculum = VarianceCurriculum(decay=decay, mix=mix)
        self.seed: int = recipe.run.seed
        self.diversity = diversity
        self.reward = None if diversity is None else rewards.reported(diversity.reward)
        self._mean: float | None = None

    def prompts_drawn(
        self, rows: Sequence[PromptRow], everything: Sequence[PromptRow], iteration: int
    ) -> Sequence[PromptRow]:
        """Draw by the history of each prompt; no prompt is drawn twice while there are enough."""
        shares = np.array(self.curriculum.probabilities([row.id for row in everything]))
        generator = np.random.default_rng(address(self.seed, 7, iteration))
        possible, count = int((shares > 0).sum()), len(rows)
        chosen = generator.choice(len(everything), size=count, replace=count > possible, p=shares / shares.sum())
        return [everything[int(k)] for k in chosen]

    def samples_scored(self, batch: Batch) -> Batch:
        """Share the answers."""
        if self.reward is not None:
            batch.columns[ANSWERS] = answers_of(batch.scores, self.reward, "extension curriculum (diversity)")
        return batch

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> None:
        """Add the rewards and the answers to the history of their prompts."""
        ids = torch.tensor(samples.prompts)
        rewards, found = total_reward(samples.scores, samples), []
        for prompt in dict.fromkeys(ids.tolist()):
            rows = (ids == prompt).nonzero().flatten().tolist()
            added = 0.0
            if self.diversity is not None:
                found.append(answer_diversity(samples.columns[ANSWERS][row] for row in rows))
                added = self.diversity.weight * found[-1]
            self.curriculum.observe(prompt, rewards[rows].tolist(), added)
        self._mean = sum(found) / len(found) if found else None

    def record(self) -> dict[str, float]:
        """Mean diversity of the answers to a prompt."""
        return {} if self._mean is None else {"diversity": self._mean}

    def state_dict(self) -> dict[str, Any]:
        """The history of each prompt."""
        return self.curriculum.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state."""
        self.curriculum.load_state_dict(state)
