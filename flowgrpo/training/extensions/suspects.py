"""Which images are suspect of exploiting the trained reward, for a penalty that only these get."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ...configs.reading_soundness import reward_place
from ...core.overrating import overrating, suspects
from ...core.penalties import SUSPECT
from ...parts.choice import Choice
from ...parts.needs import Need, needs
from ...parts.ranges import Count, Given
from ..credit.pooling import Batch, Pooled
from .extension import Extension, Rewards
from .rules import once, unknown_reward

Portion = Annotated[float, Field(gt=0, le=1)]


def _rewards_apart(recipe: Any, choice: Choice) -> list[str]:
    """The rewards exist, the trained one is optimised, and it is not among the light ones."""
    who, asked = f"extension {choice.short}", [choice["reward"], *choice["light"]]
    faults = [fault for name in asked if name is not None for fault in unknown_reward(recipe, who, name)]
    if faults:
        return faults
    trained, *light = [0 if name is None else reward_place(recipe.rewards, name) for name in asked]
    if trained in light:
        known = recipe.rewards[trained].known_as
        return [f"{who} compares reward {known} with itself; leave {known} out of light, and name another reward"]
    if recipe.rewards[trained].weight == 0:
        known = recipe.rewards[trained].known_as
        return [
            f"{who} asks whether reward {known} is exploited, and {known} has weight 0, so nothing optimises it; name "
            "a reward with another weight as `reward`"
        ]
    return []


def _is_read(recipe: Any, choice: Choice) -> list[str]:
    if recipe.task != "images" or any(penalty.short == "gated_kl" for penalty in recipe.penalties):
        return []
    return [
        f"extension {choice.short} marks images for penalty gated_kl, which is missing; add {{name: gated_kl, weight: "
        f"0.04}} to penalties, or leave {choice.short} out"
    ]


def _bounds(recipe: Any, choice: Choice) -> list[str]:
    least, share, most = choice["least"], choice["share"], choice["most"]
    if least <= share <= most:
        return []
    return [
        f"extension {choice.short}: share is {share:g}, and it moves between least {least:g} and most {most:g}; use a "
        "share between the two"
    ]


@needs(
    once,
    Need("task", ("images",), "marks images for a penalty of images"),
    _rewards_apart,
    _is_read,
    _bounds,
)
class Suspects(Extension):
    """Marks the images that the trained reward ranks higher than light rewards do, for penalty `gated_kl` (GARDO).

    In each iteration, all images are ranked by the trained reward and by each light reward. An image is overrated by
    its rank by the trained reward minus the mean of its ranks by the light rewards (GARDO, 2512.24138). Of the images
    that are not underrated, a share is suspect: the most overrated ones. The share grows in an iteration whose images
    are overrated more than in all of the iterations before it that are remembered, and falls where they are overrated
    less.

    The released code ranks the best image first and subtracts in the same way, which makes an image suspect that the
    light rewards like better. Here an image is suspect if the trained reward likes it better, as the method means it.

    Args:
        light: Labels (or names) of rewards that are not exploited; with `weight: 0` they serve this extension only.
        reward: Label (or name) of the trained reward; the first reward if left out.
        share: Share at the start.
        least: Smallest share.
        most: Largest share.
        rate: How much the share grows or falls, as a share of itself.
        window: How many iterations are remembered.
    """

    remembers = ("portion", "means")

    def __init__(
        self,
        *,
        light: Annotated[list[str], Field(min_length=1)],
        reward: str | None = None,
        share: Portion = 0.1,
        least: Portion = 0.02,
        most: Portion = 0.2,
        rate: Annotated[float, Field(ge=0, lt=1)] = 0.1,
        window: Count = 20,
        rewards: Given[Rewards],
    ) -> None:
        self.trained = rewards.names[0] if reward is None else rewards.reported(reward)
        self.light = [rewards.reported(name) for name in light]
        self.least, self.most, self.rate, self.window = least, most, rate, window
        self.portion, self.means = share, list[float]()
        self._record: dict[str, float] = {}

    def overrated(self, samples: Pooled) -> Tensor:
        """[L] how far each image of all processes is overrated; NaN for previews."""
        names = list(samples.scores.names)
        values = samples.scores.values.double().masked_fill(~samples.outcomes[:, None], torch.nan)
        light = values[:, [names.index(name) for name in self.light]]
        return overrating(values[:, names.index(self.trained)], light)

    def follow(self, mean: float) -> None:
        """Move the share by the mean by which images are overrated that are not underrated."""
        if self.means and mean > max(self.means):
            self.portion *= 1.0 + self.rate
        elif self.means and mean < min(self.means):
            self.portion *= 1.0 - self.rate
        self.portion = min(max(self.portion, self.least), self.most)
        self.means = [*self.means, mean][-self.window :]

    def advantages_made(self, advantages: Tensor, samples: Pooled, batch: Batch) -> Tensor:
        """Mark the steps of suspect images; the advantages stay as they are."""
        overrated = self.overrated(samples)
        high = overrated[overrated >= 0]
        mean = float(high.mean()) if len(high) else 0.0
        if len(high):
            self.follow(mean)
        chosen = suspects(overrated, self.portion)
        marked = float(chosen.double().mean())
        # The penalty is a mean over the suspects, and the loss divides by all images.
        factors = chosen.double() / (marked or 1.0)
        batch.experience.mark(SUSPECT, batch.experience.node_advantages(factors[samples.mine]).nan_to_num())
        self._record = {"suspects/share": self.portion, "suspects/marked": marked, "suspects/overrated": mean}
        return advantages

    def record(self) -> dict[str, float]:
        """The share, the part of all images that is marked, and the mean that moves the share."""
        return self._record
