"""Advantages that count more for hard prompts."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...core.ease import difficulty_weights, group_ease
from ...parts.choice import Choice
from ...parts.needs import idle, needs
from ...parts.ranges import Share
from ..credit.combining import total_reward
from ..credit.pooling import Batch, Pooled
from .extension import Extension
from .rules import once

EASE = "difficulty/ease"


def _most_is_a_factor(recipe: Any, choice: Choice) -> list[str]:
    most = choice["most"]
    return [] if most >= 1 else [f"extension difficulty: most is {most:g}; use a largest factor of at least 1"]


@needs(
    once, _most_is_a_factor,
    idle("strength", where=lambda choice: choice["form"] != "linear", why="only form linear has a strength"),
)  # fmt: skip
class Difficulty(Extension):
    """Multiplies advantages by a factor of the prompt's difficulty (DARS, 2508.13755; GUI-G1, 2505.15810).

    The ease of a prompt is the mean of its samples' weighted sums of rewards, kept within 0 and 1: the share of
    successes, if rewards are 0 and 1. A column of the prompt file may give it instead.

    Args:
        form: The factor. `linear` is 1 + strength (1 − 2 ease). `even` lets the advantages of a hard prompt add up to
            as much as the advantages of a prompt with ease 1/2, and `hard` to more. Both are 1 where the ease is at
            least 1/2.
        strength: How fast `linear` falls, at most 1.
        most: Largest factor.
        column: Column of the prompt file with the ease, a number from 0 to 1, such as the relative size of the place
            that is to be found; the rewards give the ease if left out.
    """

    def __init__(
        self,
        *,
        form: Literal["linear", "even", "hard"] = "linear",
        strength: Share = 1.0,
        most: float = 5.0,
        column: str | None = None,
    ) -> None:
        self.form, self.strength, self.most, self.column = form, strength, most, column
        self._mean: float | None = None

    def samples_scored(self, batch: Batch) -> Batch:
        """Share the column; raises ValueError if a prompt has no number from 0 to 1 in it."""
        if self.column is not None:
            given = [
                _share_of(row.columns.get(self.column), self.column, row.place or f"{row.text!r:.80}")
                for row in batch.rows
            ]
            batch.columns[EASE] = [given[p] for p in batch.experience.prompt_of_sample]
        return batch

    def ease(self, samples: Pooled) -> Tensor:
        """[L] from 0 for a hard prompt to 1 for an easy one; NaN for a prompt without a reward."""
        if self.column is not None:
            return torch.tensor(samples.columns[EASE], dtype=torch.float64)
        return group_ease(total_reward(samples.scores, samples), samples.groups)

    def advantages_made(self, advantages: Tensor, samples: Pooled, batch: Batch) -> Tensor:
        """Multiply by the factor of the prompt of each node."""
        factor = difficulty_weights(self.ease(samples), form=self.form, strength=self.strength, most=self.most)
        self._mean = float(factor.mean())
        mine = batch.experience.node_advantages(factor[samples.mine]).to(advantages)
        return advantages * (mine if advantages.ndim == 1 else mine[:, None])

    def record(self) -> dict[str, float]:
        """The mean factor."""
        return {} if self._mean is None else {"difficulty": self._mean}


def _share_of(value: Any, column: str, place: str) -> float:
    """The number in a column of a prompt.

    Raises:
        ValueError: it is no number from 0 to 1.
    """
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = -1.0
    if not 0 <= found <= 1:
        raise ValueError(
            f"extension difficulty reads the ease of a prompt from column {column!r}, and {place} has "
            f"{value!r:.40}; write a number from 0 for hard to 1 for easy"
        )
    return found
