"""Returns of process rewards that the worst step decides (PURE)."""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import as_precise


def step_values(step_rewards: Tensor) -> Tensor:
    """Rewards of steps [B, T], in the precision that sums use.

    Raises:
        ValueError: If `step_rewards` is not [B, T], or a reward is infinite.
    """
    if step_rewards.dim() != 2:
        raise ValueError(f"`step_rewards` has shape {tuple(step_rewards.shape)}; give one reward per step, (B, T)")
    if bool(step_rewards.isinf().any()):
        raise ValueError("`step_rewards` holds an infinite value; use NaN where a step has no reward")
    return as_precise(step_rewards)


def minimum_returns(step_rewards: Tensor) -> Tensor:
    """Value of each step, the least reward from the step on: V_t = min over k >= t of r_k (PURE, arXiv 2504.15275).

    With a sum, a policy gains reward by adding steps that a process reward model likes. With a minimum, it does not.

    Args:
        step_rewards: [B, T]; NaN for a step without a reward (padding). NaN is left out.

    Returns:
        [B, T], float32 at least, without a gradient; NaN where no step with a reward follows.

    Raises:
        ValueError: If `step_rewards` is not [B, T], or a reward is infinite.
    """
    rewards = step_values(step_rewards)
    filled = rewards.where(~rewards.isnan(), torch.inf)
    least = filled.flip(1).cummin(1).values.flip(1) if rewards.shape[1] else filled
    dtype = torch.promote_types(step_rewards.dtype, torch.float32)
    return least.masked_fill(least.isinf(), torch.nan).to(dtype)


def minimum_weighted_rewards(step_rewards: Tensor, *, temperature: float = 0.1) -> Tensor:
    """Process rewards whose sum is a soft minimum, for a trainer that adds rewards up (PURE, arXiv 2504.15275).

    r'_t = w_t r_t with the weights w = softmax(-r / temperature) over the steps of a row. The sum of r' goes to the
    least reward as the temperature goes to 0, and to the mean reward as the temperature grows.

    Args:
        step_rewards: [B, T]; NaN for a step without a reward. NaN is left out and gets 0.
        temperature: Above 0, in units of the reward.

    Returns:
        [B, T], float32 at least, without a gradient.

    Raises:
        ValueError: If `temperature` is not above 0, `step_rewards` is not [B, T], or a reward is infinite.
    """
    if not temperature > 0:
        raise ValueError(f"`temperature` is {temperature}; use a number above 0")
    rewards = step_values(step_rewards)
    absent = rewards.isnan()
    weight = (-rewards / temperature).masked_fill(absent, -torch.inf).softmax(1)
    dtype = torch.promote_types(step_rewards.dtype, torch.float32)
    return torch.where(absent, 0.0, weight * rewards).to(dtype)
