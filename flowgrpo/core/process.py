"""Rewards of the steps of a trajectory, from the image that each of its states would become without further noise."""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import as_precise

MAINS = ("step", "total", "rest", "gain")


def _rewards(step_rewards: Tensor) -> Tensor:
    if step_rewards.dim() != 2 or step_rewards.shape[1] < 2:
        raise ValueError(
            f"`step_rewards` has shape {tuple(step_rewards.shape)}; give (B, T + 1), one per state of a trajectory"
        )
    return as_precise(step_rewards)


def turning_point_rewards(step_rewards: Tensor, *, main: str = "step") -> Tensor:
    """Rewards of T steps, from the rewards of the T + 1 states before and after them (TP-GRPO, arXiv 2602.06422).

    R_t is the reward of the deterministic completion of state t. A step's own gain is d_t = R_t - R_{t-1}, and the gain
    of the whole trajectory is D = R_T - R_0. Step t is a turning point if d_t has the sign of D and d_{t-1} has the
    opposite sign. The first step is a turning point if d_1 has the sign of D.

    Args:
        step_rewards: [B, T + 1]; NaN where a state was not completed. The steps before and after that state get NaN.
        main: "step" is the paper's form: d_t, plus D at turning points. "total" is the default of the released
            configurations: D, plus d_t at turning points. "rest" is the form of the released scripts: d_t, and in its
            place R_T - R_{t-1} at turning points. A turning point must then also lead the way that the rest goes: d_t
            has the sign of R_T - R_t. "gain" is d_t alone, without turning points (DenseGRPO, arXiv 2601.20218).

    Returns:
        [B, T], in the dtype of `step_rewards` (float32 at least).

    Raises:
        ValueError: If `main` is unknown, or `step_rewards` is not [B, T + 1].
    """
    if main not in MAINS:
        raise ValueError(f"`main` is {main!r}; use one of {', '.join(MAINS)}")
    rewards = _rewards(step_rewards)
    gain = rewards.diff(dim=1)
    if main == "gain":
        return gain.to(torch.promote_types(step_rewards.dtype, torch.float32))
    total = (rewards[:, -1:] - rewards[:, :1]).expand_as(gain)
    agrees = gain.sign() * total.sign()
    before = torch.cat([torch.full_like(agrees[:, :1], -1.0), agrees[:, :-1]], dim=1)
    turning = (agrees > 0) & (before < 0)
    if main == "rest":
        rest = rewards[:, -1:] - rewards[:, 1:]
        found = gain + torch.where(turning & (gain.sign() * rest.sign() > 0), rest, 0.0)
    else:
        first, second = (gain, total) if main == "step" else (total, gain)
        found = first + torch.where(turning, second, 0.0)
    return found.to(torch.promote_types(step_rewards.dtype, torch.float32))


def future_rewards(step_rewards: Tensor, *, gamma: float = 0.9) -> Tensor:
    """Value of each of T steps: the discounted mean reward of all states after the step (VGPO, arXiv 2512.12387).

    Q_t = sum over k >= t of gamma^(k - t) R_{k + 1}, divided by the sum of the weights gamma^(k - t). So early and late
    steps are on one scale. The paper's equations are not public; the formula follows the abstract.

    Args:
        step_rewards: [B, T + 1], the reward of each state's one-step projection; the last column is the reward of the
            image.
        gamma: Discount in [0, 1]; with 0, only the next state's reward counts.

    Returns:
        [B, T], in the dtype of `step_rewards` (float32 at least).

    Raises:
        ValueError: If `gamma` is out of range, or `step_rewards` is not [B, T + 1].
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"`gamma` is {gamma}; use a discount from 0 to 1")
    rewards = _rewards(step_rewards)
    total, weight = torch.zeros_like(rewards[:, 0]), 0.0
    columns = []
    for t in range(rewards.shape[1] - 1, 0, -1):
        total, weight = rewards[:, t] + gamma * total, 1.0 + gamma * weight
        columns.append(total / weight)
    return torch.stack(columns[::-1], dim=1).to(torch.promote_types(step_rewards.dtype, torch.float32))
