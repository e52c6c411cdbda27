"""Credit of the parts of a sample, such as the lines of a completion: returns from a part on, compared in a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .advantages import group_advantages
from .worst_step import step_values

AMONG = ("place", "group")


def later_returns(step_rewards: Tensor) -> Tensor:
    """Sum of the scores from each part on: R_t = sum over k >= t of r_k.

    This is the rank-wise return of Rank-GRPO (arXiv 2510.20150); if r_k is the discounted gain of rank k, it is
    DCG@k:N. A part gets no credit for earlier parts, because it cannot have caused them.

    Args:
        step_rewards: [B, K]; NaN for a part without a score (padding). NaN is left out.

    Returns:
        [B, K], float32 at least, without a gradient; NaN where no part with a score follows.

    Raises:
        ValueError: If `step_rewards` is not [B, K], or a score is infinite.
    """
    rewards = step_values(step_rewards)
    known = ~rewards.isnan()
    total = torch.where(known, rewards, 0.0).flip(1).cumsum(1).flip(1)
    follows = known.flip(1).cumsum(1).flip(1) > 0
    return total.masked_fill(~follows, torch.nan).to(torch.promote_types(step_rewards.dtype, torch.float32))


def part_advantages(returns: Tensor, groups: Tensor | Sequence[int], *, among: str = "place", **kw: Any) -> Tensor:
    """Advantages of parts within a group, whose samples may have different numbers of parts.

    Args:
        returns: [B, K]; NaN where a row has no k-th part, or the return is unknown.
        groups: [B] integer ids.
        among: "place" compares a k-th part with the k-th parts of its group (Rank-GRPO, arXiv 2510.20150); the only
            k-th part of a group gets 0. "group" compares a part with all parts of its group, each counted once.
        **kw: Keyword arguments of `group_advantages`.

    Returns:
        [B, K], float32 at least; 0 where `returns` is NaN.

    Raises:
        ValueError: If `among` is unknown, `returns` is not [B, K], or as in `group_advantages`.
    """
    if among not in AMONG:
        raise ValueError(f"`among` is {among!r}; use one of {', '.join(AMONG)}")
    if returns.dim() != 2:
        raise ValueError(f"`returns` has shape {tuple(returns.shape)}; give one value per part, (B, K)")
    if among == "place":
        return group_advantages(returns, groups, **kw)
    ids = torch.as_tensor(groups, device=returns.device)
    if ids.shape != returns.shape[:1]:
        raise ValueError(f"`groups` has shape {tuple(ids.shape)}; give one group id per row, ({len(returns)},)")
    return group_advantages(returns.flatten(), ids.repeat_interleave(returns.shape[1]), **kw).reshape(returns.shape)
