"""Advantages of samples that must satisfy several judges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import sum_by_group
from .grouped import grouped, one_per_row


def satisfied_judges(scores: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Say which samples violate no constraint (CGPO's mixture of judges, arXiv 2409.20370).

    Args:
        scores: [B, M], one column per judge; NaN where a judge does not apply to a sample, and then it has no say.
        thresholds: [M] least score that satisfies each judge.

    Returns:
        [B] bool.

    Raises:
        ValueError: If there is not one threshold per judge.
    """
    if scores.dim() != 2 or scores.shape[1] != len(thresholds):
        raise ValueError(
            f"`scores` has shape {tuple(scores.shape)}; give one column per threshold, (B, {len(thresholds)})"
        )
    # The comparison is made in the precision of the scores: there a score that is written like a threshold reaches it.
    bars = torch.tensor(list(thresholds), dtype=scores.dtype, device=scores.device)
    return ((scores >= bars) | scores.isnan()).all(1)


def calibrated_advantages(
    rewards: Tensor,
    satisfied: Tensor,
    groups: Tensor | Sequence[int],
    *,
    best: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """The calibrated reward of samples that satisfy all judges, and 0 for the others (CGPO, arXiv 2409.20370).

    The calibrated reward is sigmoid((r - b) / scale), in (0, 1). b is the mean reward of the group; the paper takes the
    reward of a reference answer. So a sample that satisfies the judges is pushed, the more the better it is, and a
    sample that violates a judge is not pushed, however high its reward is. In a group without a sample that satisfies
    the judges, nothing is learned.

    Args:
        rewards: [B]. A NaN enters no statistic and gets advantage 0.
        satisfied: [B] bool.
        groups: [B] integer ids.
        best: Whether only the best sample of a group that satisfies the judges is pushed, as in reward-ranked
            fine-tuning (CRRAFT); of several equal ones, all. If not, all are pushed, as in the policy gradient (CRPG).
        scale: What differences of rewards are divided by, above 0.

    Returns:
        Advantages [B], float32 at least.

    Raises:
        ValueError: If `scale` is not above 0, or shapes do not match.
    """
    if not scale > 0:
        raise ValueError(f"`scale` is {scale}; use a number above 0")
    data = grouped(rewards, groups)
    values = data.values[:, 0]
    counted = one_per_row(satisfied, len(values), "satisfied").to(values.device).bool() & ~values.isnan()
    known = (~values.isnan()).to(values)[:, None]
    sums = sum_by_group(torch.cat([values.nan_to_num(0.0)[:, None], known], 1), data.index, data.count)
    mean = (sums[:, 0] / sums[:, 1])[data.index]
    if best:
        top = values.new_full((data.count,), -torch.inf)
        top = top.scatter_reduce(0, data.index, values.where(counted, -torch.inf), "amax")
        counted = counted & (values == top[data.index])
    return data.restore(torch.where(counted, torch.sigmoid((values - mean) / scale), 0.0)[:, None])
