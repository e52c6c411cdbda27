"""The weight of a reward changes over a run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from ...configs.reading_soundness import reward_place
from ...parts.choice import Choice
from ...parts.needs import idle, needs
from ...parts.ranges import Count, Given, Several
from ..credit.combining import compared_alone
from ..credit.pooling import Batch
from .extension import Extension, Rewards
from .rules import names_a_reward, of_reward, once_per_reward

Shape = Literal["linear", "cosine", "steps"]


def scheduled_weight(start: float, end: float, done: float, *, shape: Shape = "linear", levels: int = 2) -> float:
    """The weight after a share `done` in [0, 1] of the way from `start` to `end`.

    `linear` moves at one speed. `cosine` begins and ends slowly: (1 - cos(pi done)) / 2 of the way is done. `steps` has
    `levels` stretches of equal length, each with a constant weight; the first has `start`, and the last has `end`.
    """
    if shape == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    elif shape == "steps":
        done = min(math.floor(done * levels), levels - 1) / (levels - 1)
    return start + (end - start) * done


def _leaves_a_reward(recipe: Any, choice: Choice) -> list[str]:
    """A reward of weight 0 is left out, so another one has to count, and parts that count rewards have to agree."""
    if choice["start"] * choice["end"] > 0:
        return []
    mine = [other for other in recipe.extensions if other.name == choice.name]
    scheduled = {reward_place(recipe.rewards, other["reward"]) for other in mine}
    steady = [k for k, reward in enumerate(recipe.rewards) if reward.weight != 0 and k not in scheduled]
    who = f"extension schedule lets the weight of reward {choice['reward']} reach 0"
    if not steady:
        return [f"{who}, and no reward without a schedule counts; let `start` and `end` have one sign"]
    if compared_alone(recipe.rewards):
        return [f"{who}, and the recipe has `at_least` or `gate.apart`; let `start` and `end` have one sign"]
    return []


@needs(
    names_a_reward,
    once_per_reward,
    of_reward(
        lambda reward: reward.weight != 0,
        "moves the weight of reward {reward}, which has `weight: 0` and is only recorded; write another weight, which "
        "the schedule replaces",
    ),
    of_reward(
        lambda reward: reward.at_least is None,
        "moves the weight of reward {reward}, which has `at_least`, so that extension multipliers finds the weight; "
        "leave one of them out",
    ),
    _leaves_a_reward,
    idle("levels", where=lambda choice: choice["shape"] != "steps", why="only shape steps has levels"),
)
class RewardSchedule(Extension):
    """Moves the weight of a reward over the run: process rewards early, the outcome late (Atom-Searcher, 2508.12800).

    The weight is `start` in the first iteration. It replaces the `weight` of the recipe, also in `reward/total`. At a
    weight of 0, the reward is only recorded. Rollouts that ask the rewards themselves (forms, budgets) use the weights
    of the recipe.

    Args:
        reward: Label (or name) of the reward.
        start: Weight in the first iteration.
        end: Weight after `over` iterations, and from then on.
        shape: How the weight moves between them: `linear`, `cosine`, or in `steps` of equal length.
        levels: Number of different weights, for `steps`.
        over: Number of iterations; all of the run if left out.
    """

    def __init__(
        self,
        *,
        reward: str,
        start: float,
        end: float,
        shape: Shape = "linear",
        levels: Several = 2,
        over: Count | None = None,
        recipe: Given[Any],
        rewards: Given[Rewards],
    ) -> None:
        self.reward, self.start, self.end = rewards.reported(reward), start, end
        self.shape, self.levels, self.over = shape, levels, over or recipe.run.iterations
        self.weight = start

    def samples_scored(self, batch: Batch) -> Batch:
        """Give the reward the weight of this iteration."""
        done = min(self.iteration / self.over, 1.0)
        self.weight = scheduled_weight(self.start, self.end, done, shape=self.shape, levels=self.levels)
        weights = batch.scores.weights.clone()
        weights[batch.scores.names.index(self.reward)] = self.weight
        return replace(batch, scores=replace(batch.scores, weights=weights))

    def record(self) -> dict[str, float]:
        """The weight of this iteration."""
        return {f"weight/{self.reward}": self.weight}
