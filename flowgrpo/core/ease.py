"""Weights of prompts by how hard they are, and how much exploration a prompt deserves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import sum_by_group
from .grouped import grouped, one_per_row

FORMS = ("linear", "even", "hard")


def group_ease(rewards: Tensor, groups: Tensor | Sequence[int]) -> Tensor:
    """[B] the mean reward of each row's group, kept within 0 and 1: for rewards of 0 and 1, the share of successes.

    Args:
        rewards: [B]; a NaN does not enter the mean.
        groups: [B] integer ids.

    Returns:
        [B], NaN for a group without a reward.
    """
    data = grouped(one_per_row(rewards, len(rewards), "rewards"), groups)
    known = ~data.values.isnan()
    sums = sum_by_group(torch.cat([data.values.nan_to_num(), known.to(data.values)], 1), data.index, data.count)
    return (sums[:, 0] / sums[:, 1])[data.index].clamp(0.0, 1.0)


def difficulty_weights(ease: Tensor, *, form: str = "linear", strength: float = 1.0, most: float = 5.0) -> Tensor:
    """Factors of the advantages of a prompt from its ease.

    Let u be the ease, from 0 to 1. With rewards of 0 and 1 and advantages over the standard deviation, the sizes of a
    group's advantages add up to 2 N sqrt(u (1 - u)). So GRPO cares most about prompts of medium ease.

    - "linear": 1 + strength (1 - 2 u). It is 1 at u = 1/2, and rises as prompts get harder.
    - "even": for a hard prompt, u below 1/2, the factor with which its advantages add up to as much as at u = 1/2:
      1 / (2 sqrt(u (1 - u))). Otherwise 1.
    - "hard": for a hard prompt, 2 (1 - u) times the factor of "even", so that harder prompts count more than prompts
      of medium ease. Otherwise 1.

    "even" and "hard" are the two goals of DARS (arXiv 2508.13755), which reaches them by more samples of hard prompts.

    Args:
        ease: [B] in 0..1; a NaN gets the factor 1.
        form: one of the above.
        strength: of "linear", from 0 to 1.
        most: largest factor.

    Returns:
        [B].

    Raises:
        ValueError: If a choice or a number is out of range.
    """
    if form not in FORMS:
        raise ValueError(f"`form` is {form!r}; use one of {', '.join(FORMS)}")
    if not (0 <= strength <= 1 and most >= 1):
        raise ValueError(f"strength={strength}, most={most}; use a strength from 0 to 1, and most of at least 1")
    if form == "linear":
        found = 1 + strength * (1 - 2 * ease)
    else:
        even = 0.5 / (ease * (1 - ease)).sqrt()
        factor = even if form == "even" else even * 2 * (1 - ease)
        found = torch.where(ease < 0.5, factor, 1.0)
    return torch.where(ease.isnan(), 1.0, found.clamp(max=most))
