"""A budget of tokens that becomes smaller during the run, and a reward for being near it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.token_budgets import budget_at, triangular
from ...parts.choice import Choice
from ...parts.needs import Need, needs
from ...parts.ranges import Count, Fraction, NotNegative
from ..credit.combining import compared_alone, total_reward
from .extension import CREDIT, Comparison, Extension
from .rules import once


def _one_sum(recipe: Any, choice: Choice) -> list[str]:
    advantage, who = recipe.advantage, f"extension {choice.short} adds to the sum of rewards"
    faults = []
    if advantage is not None and advantage.name == "group" and advantage["baseline"] != "mean":
        faults.append(f"{who}, and compares it with the mean of the group; use advantage.baseline mean")
    for name in compared_alone(recipe.rewards):
        faults.append(f"{who}, and reward {name} is compared by itself; leave out at_least and gate.apart")
    return faults


@needs(
    once, Need("task", ("text",), "counts the tokens of completions"),
    Need("advantage", ("group",), "adds to the sum of rewards, and compares it within the group"),
    Need(CREDIT, ("leaf",), "changes the advantages of samples, not of tokens"), _one_sum,
)  # fmt: skip
class Tightening(Extension):
    """Adds a reward for a length near a budget, which shrinks in steps (Train Long, Think Short, arXiv 2508.08940).

    The reward is max(0, 1 - |n - B| / B) for n tokens and the budget B. The budget of an iteration is max(least, start
    factor^floor(iteration / every)).

    Args:
        start: Budget at the beginning, in tokens.
        factor: What a step leaves of the budget.
        every: Iterations between two steps.
        least: The smallest budget, in tokens.
        weight: Of the reward, in the sum of all rewards.
    """

    def __init__(
        self, *, start: Count = 256, factor: Fraction = 0.8, every: Count = 20, least: Count = 1,
        weight: NotNegative = 0.5,
    ) -> None:  # fmt: skip
        self.start, self.factor, self.every, self.least, self.weight = start, factor, every, least, weight
        self._budget, self._mean = float(start), 0.0

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """Compare the rewards again, with the reward of the lengths among them."""
        samples = comparison.samples
        self._budget = budget_at(
            self.iteration, start=self.start, factor=self.factor, every=self.every, least=self.least
        )  # fmt: skip
        assert samples.lengths is not None
        near = triangular(samples.lengths, self._budget)
        self._mean = float(near[samples.outcomes].mean()) if bool(samples.outcomes.any()) else 0.0
        return comparison.compare(total_reward(comparison.scores, samples) + self.weight * near)

    def record(self) -> dict[str, float]:
        """The budget, and the mean reward of the lengths."""
        return {"length_budget": self._budget, "length_reward": self._mean}
