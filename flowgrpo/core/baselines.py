"""Baselines other than the mean of the group: a virtual sample, peers, a Beta distribution, a shared state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import group_advantages, group_moments
from .grouped import cells, grouped, one_per_row, standardised


def virtual_maximum_advantages(
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    *,
    maximum: float = 1.0,
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """Advantages in groups with one additional, virtual sample of the highest reward (NGRPO, arXiv 2509.18851).

    A = (r - mean) / (std + eps) with mean and standard deviation over the group and `maximum`. A group in which every
    sample failed gets negative advantages. Only a group whose rewards all equal `maximum` gets exactly 0. The
    advantages of a group add up to (mean - maximum) / (std + eps), not to 0.

    Args:
        rewards: [B] or [B, ...]; columns are independent. A NaN enters no statistic and gets advantage 0.
        groups: [B] integer ids, in any order; groups may differ in size.
        maximum: The highest reward that a sample can get.
        eps: Added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        Advantages shaped like `rewards`, float32 at least.

    Raises:
        ValueError: If a reward is above `maximum` or infinite, or shapes do not match.
    """
    data = grouped(rewards, groups)
    # The comparison is made in the precision of the rewards: there a reward that is written like the maximum equals it.
    top = torch.tensor(maximum, dtype=rewards.dtype if rewards.is_floating_point() else data.dtype).to(data.values)
    if bool((data.values > top).any()):
        raise ValueError(f"`rewards` holds a value above `maximum`, {maximum}; give the highest reward that can occur")
    everyone = torch.arange(data.count, device=data.index.device)
    values = torch.cat([data.values, top.expand(data.count, data.values.shape[1])])
    moments = group_moments(values, torch.cat([data.index, everyone]), data.count, ddof)
    return data.restore(standardised(data.values, data.index, moments, eps))


def stratified_advantages(
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    strata: Tensor | Sequence[int],
    *,
    alpha: float = 0.8,
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """A blend of advantages among peers and advantages in the whole group (Stratified GRPO, arXiv 2510.06214).

    A = alpha S + (1 - alpha) G. S standardises a reward among the rows of its group that have its stratum (a
    resolution, a number of tool calls). G standardises it in its whole group. A row that is alone in its stratum has
    S = 0.

    Args:
        rewards: [B] or [B, ...]; columns are independent. A NaN enters no statistic and gets advantage 0.
        groups: [B] integer ids.
        strata: [B] integer ids; one id in two groups means two strata.
        alpha: Weight of the stratum in [0, 1]; 0 is GRPO.
        eps: Added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        Advantages shaped like `rewards`, float32 at least.

    Raises:
        ValueError: If `alpha` is out of range, or as in `group_advantages`.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"`alpha` is {alpha}; use a weight from 0 (the group alone) to 1 (the stratum alone)")
    data = grouped(rewards, groups)
    stratum, count = cells(data.index, strata, "strata")
    inside = standardised(data.values, stratum, group_moments(data.values, stratum, count, ddof), eps)
    whole = standardised(data.values, data.index, data.moments(ddof), eps)
    return data.restore(alpha * inside + (1.0 - alpha) * whole)


def beta_advantages(rewards: Tensor, groups: Tensor | Sequence[int]) -> Tensor:
    """Binary rewards normalised by a Beta density of their group's success rate (BNPO, arXiv 2506.02864).

    A = (r - p) / f(p; 1 + a / 3, 1 + b / 3) for the success rate p of the group and the density f of a Beta
    distribution. Beta(a, b) is found by moments: it has the mean m and the (population) variance v of the rates of all
    groups given here, so a = (m (1 - m) / v - 1) m and b = (m (1 - m) / v - 1) (1 - m). With a = b = 0, f is 1 and A is
    the advantage of REINFORCE with a baseline. With a = b = 3/2, f is 8/pi sqrt(p (1 - p)) and A is the advantage of
    GRPO times pi/8. If all rates are equal, no Beta can be found, and a = b = 3/2 is taken.

    Args:
        rewards: [B] or [B, ...], 0 or 1; columns are independent, so several rewards may be normalised separately and
            added. A NaN enters no statistic and gets advantage 0.
        groups: [B] integer ids. Gather the batch first if it is spread over ranks.

    Returns:
        Advantages shaped like `rewards`, float32 at least; 0 in a group of one outcome.

    Raises:
        ValueError: If a reward is neither 0 nor 1, or shapes do not match.
    """
    data = grouped(rewards, groups)
    values = data.values
    if bool(((values != 0) & (values != 1) & ~values.isnan()).any()):
        raise ValueError(
            "`rewards` holds a value that is neither 0 nor 1; give binary rewards, NaN where there is none"
        )
    moments = data.moments(0)
    rate = torch.where(moments.count > 0, moments.minimum + moments.offset, torch.nan)
    over = group_moments(rate, torch.zeros_like(data.index[:1]).expand(data.count), 1, 0)
    mean, variance = (over.minimum + over.offset)[0], over.std.square()[0]
    spread = mean * (1.0 - mean) / variance - 1.0
    a, b = (torch.where(over.degenerate[0], 1.5, spread * share) for share in (mean, 1.0 - mean))
    log_beta = torch.lgamma(1.0 + a / 3.0) + torch.lgamma(1.0 + b / 3.0) - torch.lgamma(2.0 + (a + b) / 3.0)
    log_density = torch.xlogy(a / 3.0, rate) + torch.xlogy(b / 3.0, 1.0 - rate) - log_beta
    scale = torch.where(moments.degenerate, 0.0, (-log_density).exp())[data.index]
    return data.restore((values - rate[data.index]) * scale)


def anchor_state_advantages(
    returns: Tensor,
    groups: Tensor | Sequence[int],
    states: Tensor | Sequence[int],
    episode: Tensor,
    *,
    weight: float = 1.0,
    scale: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """Advantages among steps that start in one state, plus the advantages of their episodes (GiGPO, arXiv 2505.10978).

    A = E + weight * S for every step of every trajectory. E is the advantage of the step's trajectory in its group. S
    is the advantage of the step's return among all steps of the group that were taken in the same state, in any
    trajectory. A state that occurs once has S = 0.

    Args:
        returns: [N] discounted reward from each step on. A NaN enters no statistic and has S = 0.
        groups: [N] integer ids.
        states: [N] integer ids of the states in which the steps were taken (a hash of the state, a branch).
        episode: [N] `group_advantages` of the trajectories, repeated for their steps; NaN counts as 0.
        weight: Weight of the comparison by state.
        scale: "group" divides by the standard deviation, "none" does not.
        eps: Added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        Advantages [N], float32 at least.

    Raises:
        ValueError: For an unknown `scale`, an infinite return, or shapes that do not match.
    """
    if scale not in ("group", "none"):
        raise ValueError(f"`scale` is {scale!r}; use 'group' or 'none'")
    data = grouped(returns, groups, "returns")
    one_per_row(returns, len(returns), "returns")
    macro = one_per_row(episode.detach(), len(returns), "episode").to(data.values)
    anchor, _ = cells(data.index, states, "states")
    micro = group_advantages(data.values[:, 0], anchor, scale=scale, eps=eps, ddof=ddof)
    return (torch.where(macro.isnan(), 0.0, macro) + weight * micro).to(data.dtype)
