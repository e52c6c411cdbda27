"""The check of a reward's gradient with respect to its images."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo.rewards.base import Reward
from flowgrpo.rewards.runner import RewardSet


def slope_ratio(
    plugin: object,
    images: Tensor,
    prompts: Sequence[str],
    step: float,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> float:
    """What a small change along the gradient adds to the scores, divided by what the gradient says that it adds.

    Args:
        plugin: a reward.
        images: [B, 3, H, W], far enough from 0 and 1.
        prompts: B strings.
        step: the largest change of a pixel.
        columns: of the prompts.
    """
    rewards = RewardSet([Reward(plugin, "one", weight=2.0)])  # type: ignore[arg-type]
    values, slopes = rewards.gradients(images, prompts, columns)
    plain = rewards.score(images, prompts, columns, groups=list(range(len(prompts)))).values[:, 0]
    torch.testing.assert_close(values.cpu(), 2.0 * plain, atol=1e-5, rtol=1e-4)
    assert bool((slopes.flatten(1).abs().sum(1) > 0).all())
    along = slopes * (step / slopes.abs().max())
    up, down = (rewards.score(images + sign * along, prompts, columns).values[:, 0].double().sum() for sign in (1, -1))
    return float(2.0 * (up - down) / (2.0 * (slopes.double() * along.double()).sum()))
