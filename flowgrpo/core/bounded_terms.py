"""Terms that adjust an advantage or a reward within bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import group_advantages
from .grouped import grouped, one_per_row


def positive_only_advantages(
    rewards: Tensor,
    auxiliary: Tensor,
    correct: Tensor,
    groups: Tensor | Sequence[int],
    *,
    weight: float = 1.0,
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """Add an auxiliary reward among the correct samples only (the decoupling of DRPO, arXiv 2510.04474).

    A = G + weight * X for a correct sample, and A = G for any other sample. G are the `group_advantages` of `rewards`.
    X are the `group_advantages` of `auxiliary` (for example a short length) among the correct samples of the group. For
    a correct sample A is never below min(G, 0), so a correct sample is not punished for its length. Only this rule is
    taken from the paper; the paper's objective is a discriminative one.

    Args:
        rewards: [B]. A NaN enters no statistic and gets advantage 0.
        auxiliary: [B], higher is better; its values for samples that are not correct have no influence. NaN where it
            does not apply; a NaN adds 0.
        correct: [B] bool.
        groups: [B] integer ids.
        weight: Weight of the auxiliary advantage, not negative.
        eps: Added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        Advantages [B], float32 at least.

    Raises:
        ValueError: If `weight` is negative, or as in `group_advantages`.
    """
    if weight < 0:
        raise ValueError(
            f"`weight` is {weight}; use 0 or more, and change the sign of `auxiliary` where less is better"
        )
    data = grouped(rewards, groups)
    rows = len(one_per_row(rewards, len(rewards), "rewards"))
    chosen = one_per_row(correct, rows, "correct").to(data.values.device).bool() & ~data.values[:, 0].isnan()
    extra = one_per_row(auxiliary, rows, "auxiliary").to(data.values).masked_fill(~chosen, torch.nan)
    main = group_advantages(data.values[:, 0], data.index, eps=eps, ddof=ddof)
    among = group_advantages(extra, data.index, eps=eps, ddof=ddof)
    shaped = (main + weight * among).maximum(main.clamp(max=0.0))
    return torch.where(chosen, shaped, main).to(data.dtype)


def bounded_shaping(
    advantages: Tensor,
    signal: Tensor,
    groups: Tensor | Sequence[int],
    *,
    strength: float = 1.0,
    bound: float = 0.5,
) -> Tensor:
    """Add the signal of a behaviour to normalised advantages (ASPO, arXiv 2508.19201).

    A' = A + clamp(strength * (s - mean of s in the group), -bound |A|, bound |A|). Because `bound` is below 1, an
    advantage keeps its sign, and an advantage of 0 stays 0. The abstract has no equation; this is its plainest form.

    Args:
        advantages: [B]; NaN counts as 0.
        signal: [B] the behaviour to encourage; a higher value gets more (example: minus the place of the first tool
            call). A NaN does not enter the mean and adds 0.
        groups: [B] integer ids.
        strength: Strength of the signal; negative to discourage the behaviour.
        bound: Largest change as a share of the advantage, in [0, 1).

    Returns:
        Advantages [B], float32 at least.

    Raises:
        ValueError: If `bound` is out of range, a signal is infinite, or shapes do not match.
    """
    if not 0.0 <= bound < 1.0:
        raise ValueError(f"`bound` is {bound}; use 0 <= bound < 1, so that no advantage changes its sign")
    data = grouped(advantages, groups, "advantages")
    one_per_row(advantages, len(advantages), "advantages")
    other = grouped(one_per_row(signal, len(advantages), "signal").to(data.values.device), data.index, "signal")
    centred = group_advantages(other.values, data.index, scale="none")
    limit = bound * data.values.abs()
    return data.restore(data.values + (strength * centred).clamp(-limit, limit))


def unlikeliness_rewards(
    rewards: Tensor, log_prob: Tensor, groups: Tensor | Sequence[int], *, beta: float = 0.25
) -> Tensor:
    """Rewards of successes, made smaller where the policy found them likely (Rewarding the Unlikely, arXiv 2506.02355).

    r' = r (1 - beta (G - rank) / G) for the G samples of a group. Ranks go by log-prob, from 1 for the likeliest to G.
    The least likely sample keeps its reward. The likeliest loses a share of up to `beta`. Samples of equal log-prob
    share the mean of their ranks. A reward that is not positive stays as it is, because the factor would favour likely
    failures.

    Args:
        rewards: [B]; NaN stays NaN, and its row is not ranked.
        log_prob: [B] log-prob of each whole sample under the policy that drew it.
        groups: [B] integer ids.
        beta: Largest share of a reward that a sample can lose, in [0, 1].

    Returns:
        Rewards [B], float32 at least, without a gradient.

    Raises:
        ValueError: If `beta` is out of range, a reward has no log-prob, or shapes do not match.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"`beta` is {beta}; use a share from 0 to 1")
    data = grouped(rewards, groups)
    values = one_per_row(data.values[:, 0], len(rewards), "rewards")
    likely = one_per_row(log_prob, len(rewards), "log_prob").to(values)
    ranked = ~values.isnan()
    if bool((ranked & likely.isnan()).any()):
        raise ValueError("`log_prob` is NaN where `rewards` is not; give the log-prob of every sample with a reward")
    peers = (data.index[:, None] == data.index[None, :]) & ranked[None, :]
    more = (peers & (likely[None, :] > likely[:, None])).sum(1)
    equal = (peers & (likely[None, :] == likely[:, None])).sum(1)
    rank = more + (equal + 1) / 2
    factor = 1.0 - beta * (peers.sum(1) - rank) / peers.sum(1)
    return torch.where(values > 0, values * factor, values).to(data.dtype)
