"""Rewards and advantages of completions that are made to answer early, or that have a budget of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .advantages import as_precise, group_advantages, group_index, group_means
from .baselines import anchor_state_advantages
from .grouped import cells

EARLIER = 2.0
"""BRPO: how much more the reward at a budget counts than the reward at the budget before, in the mean of the past."""


def decayed_rewards(
    rewards: Tensor, paths: Sequence[int], exits: Sequence[int], *, decay: float = 0.5, success: float = 0.5
) -> Tensor:
    """Rewards of the exits of a path: each correct exit gets less than the one before (S-GRPO, arXiv 2505.07686).

    The reward is decay^k for the k-th correct exit of its path, counted from 0 in the order of `exits`, and 0 for a
    wrong one. So the first correct exit gets 1.

    Args:
        rewards: [N]; NaN stays NaN.
        paths: [N] ids of the paths.
        exits: [N] places in the order of a path.
        decay: from 0 to 1.
        success: the least reward of a correct exit.
    """
    found = torch.where(rewards.isnan(), torch.nan, 0.0)
    seen: dict[int, int] = {}
    for row in sorted(range(len(rewards)), key=lambda k: exits[k]):
        if float(rewards[row]) >= success:
            number = seen[paths[row]] = seen.get(paths[row], -1) + 1
            found[row] = decay**number
    return found


def budget_relative_advantages(rewards: Tensor, groups: Tensor | Sequence[int], prior: Tensor) -> Tensor:
    """Advantages of the thoughts between budgets (BRPO of AnytimeReasoner, arXiv 2505.13438).

    The return of stretch j, the thoughts between budgets j - 1 and j, is R_j = sum over k >= j of p_k r_k. With J
    budgets and j counted from 0, its baseline is j / J V1 + (J - j) / J V2. V1 is the mean of the rewards at the
    earlier budgets of the same thoughts, in which each budget counts twice as much as the one before, times the sum
    over k >= j of p_k. V2 is the mean of R_j over the group.

    Args:
        rewards: [N, J] rewards of the answers at each budget. A NaN is unknown: its budget has no weight, and the
            other budgets of its thoughts have all the weight.
        groups: [N] integer ids.
        prior: [J] weights of the budgets, not negative; they are divided by their sum.

    Returns:
        [N, J], float32; NaN for thoughts after which no reward is known.

    Raises:
        ValueError: `rewards` is not [N, J] for the J weights, or no weight is above 0.
    """
    if rewards.dim() != 2 or prior.shape != rewards.shape[1:]:
        raise ValueError(
            f"`rewards` has shape {tuple(rewards.shape)} and `prior` {tuple(prior.shape)}; give (N, J) and (J,)"
        )
    if not float(prior.sum()) > 0 or bool((prior < 0).any()):
        raise ValueError(f"`prior` is {prior}; use weights that are not negative, at least one above 0")
    known, chance = ~rewards.isnan(), as_precise(prior / prior.sum())
    values, there = as_precise(rewards).nan_to_num(0.0), as_precise(known)
    left = chance.flip(0).cumsum(0).flip(0)
    # The weight of the budgets from j on whose reward is known.
    weight = (there * chance).flip(1).cumsum(1).flip(1)
    returns = (values * chance).flip(1).cumsum(1).flip(1) * torch.where(weight > 0, left / weight, torch.nan)
    place = torch.arange(len(chance)).to(chance)
    # Column j has the weights of the budgets before j.
    past = (EARLIER**place)[:, None].repeat(1, len(chance)).triu(1)
    earlier = there @ past
    own = values @ past / torch.where(earlier > 0, earlier, 1.0) * left
    # Without a known reward in the past, the group alone is the baseline.
    share = torch.where(earlier > 0, place / len(chance), 0.0)
    return (returns - share * own - (1.0 - share) * group_means(returns, groups)).float()


def budgeted_rewards(rewards: Tensor, lengths: Tensor, budgets: Tensor, longest: int, *, price: float = 0.25) -> Tensor:
    """Rewards that depend on the length, and on the budget of a completion (HBPO, arXiv 2507.15844).

    A reward is multiplied by min(cos(pi n / 2L) - price |n - b| / L, cos(pi b / 2L)), with n tokens, budget b and the
    longest length L. So a completion gains by being short, but not by being shorter than its budget. The price is that
    of the released code, whose factor is 4 times as large.

    Args:
        rewards: [N].
        lengths: [N] tokens, at most `longest`.
        budgets: [N] tokens, at most `longest`.
        longest: tokens.
        price: of a distance of `longest` tokens from the budget.

    Raises:
        ValueError: a budget is above `longest`.
    """
    if bool((budgets > longest).any()):
        raise ValueError(
            f"a budget is {int(budgets.max())} tokens, and the longest length is {longest}; use at most that"
        )

    def worth(tokens: Tensor) -> Tensor:
        return (math.pi / 2 * as_precise(tokens).clamp(max=longest) / longest).cos()

    distance = as_precise((lengths - budgets).abs()) / longest
    return (rewards * (worth(lengths) - price * distance).minimum(worth(budgets))).to(rewards)


def nested_advantages(
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    subgroups: Tensor | Sequence[int],
    *,
    between: float = 1.0,
    **kw: Any,
) -> Tensor:
    """The comparison within a subgroup, plus the comparison of the subgroup's mean within the group.

    A = (r - m_s) / std_s + between (m_s - m_g) / std_g, for the mean and the standard deviation of subgroup and group.
    With scale "none" and `between` 1, this is r - m_g. These are `anchor_state_advantages` whose states are subgroups,
    and whose episodes are worth what their subgroup is worth in the group.

    Args:
        rewards: [N]; a NaN enters no statistic and gets 0.
        groups: [N] integer ids.
        subgroups: [N] integer ids within a group; two groups may use the same ids.
        between: weight of the comparison of subgroups.
        **kw: `scale`, `eps` and `ddof` of `anchor_state_advantages`, for both comparisons.

    Returns:
        Advantages [N], float32 at least.

    Raises:
        ValueError: As in `anchor_state_advantages`.
    """
    index, _ = group_index(groups, len(rewards), rewards.device)
    own, _ = cells(index, subgroups, "subgroups")
    of_group = group_advantages(rewards, index, **kw).masked_fill(rewards.isnan(), torch.nan)
    return anchor_state_advantages(rewards, index, subgroups, between * group_means(of_group, own), **kw)


def budget_at(iteration: int, *, start: float, factor: float, every: int, least: float = 1.0) -> float:
    """The budget of an iteration, max(least, start factor^floor(iteration / every)), in tokens (arXiv 2508.08940).

    Args:
        iteration: from 0.
        start: tokens at the beginning.
        factor: what a step leaves of the budget.
        every: iterations between two steps.
        least: the smallest budget.
    """
    return max(least, start * factor ** (iteration // every))


def triangular(lengths: Tensor, budget: float) -> Tensor:
    """[N] max(0, 1 - |n - budget| / budget): 1 at the budget, 0 for no tokens and for twice the budget (2508.08940)."""
    return (1.0 - (as_precise(lengths) - budget).abs() / budget).clamp(min=0.0).float()
