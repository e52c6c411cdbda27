"""Terms that bend an advantage or a reward without turning what it says: each of them is bounded."""

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

    A = G + weight * X for a correct sample, and G for another: G are the `group_advantages` of `rewards`, X those of
    `auxiliary` (a short length, say) among the correct samples of the group. Where the sum would be negative and G is
    not, A is 0, and it is never below a negative G: a correct sample is not punished for its length. Only this rule is
    taken from the paper, whose objective is a discriminative one.

    Args:
        rewards: [B]. NaN leaves every statistic and gets 0.
        auxiliary: [B], higher is better; what it holds for a sample that is not correct has no influence. NaN where
            it does not apply, which adds 0.
        correct: [B] bool.
        groups: [B] integer ids.
        weight: Not negative; of the auxiliary advantage.
        eps: Added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        Advantages [B], float32 at least.

    Raises:
        ValueError: A negative `weight`, or as `group_advantages`.
    """
    if weight < 0:
        raise ValueError(f"`weight` is {weight}; use 0 or more, and turn the sign of `auxiliary` where less is better")
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
    """Add a behaviour's signal to advantages after they were normalised (ASPO, arXiv 2508.19201).

    A' = A + clamp(strength * (s - mean of s in the group), -bound |A|, bound |A|). As `bound` is below 1 the sign of
    an advantage and its 0 stay. The abstract has no equation; this is its plainest form.

    Args:
        advantages: [B]; NaN counts as 0.
        signal: [B] what to encourage, higher is more (minus the place of the first tool call). NaN leaves the mean
            and adds 0.
        groups: [B] integer ids.
        strength: Of the signal; negative to discourage it.
        bound: In [0, 1), the largest change as a share of the advantage.

    Returns:
        Advantages [B], float32 at least.

    Raises:
        ValueError: `bound` out of range, an infinite signal, or shapes that do not match.
    """
    if not 0.0 <= bound < 1.0:
        raise ValueError(f"`bound` is {bound}; use a share from 0 up to, but not, 1, so that no sign turns")
    data = grouped(advantages, groups, "advantages")
    one_per_row(advantages, len(advantages), "advantages")
    other = grouped(one_per_row(signal, len(advantages), "signal").to(data.values.device), data.index, "signal")
    centred = group_advantages(other.values, data.index, scale="none")
    limit = bound * data.values.abs()
    return data.restore(data.values + (strength * centred).clamp(-limit, limit))


def unlikeliness_rewards(
    rewards: Tensor, log_prob: Tensor, groups: Tensor | Sequence[int], *, beta: float = 0.25
) -> Tensor:
    """Rewards of successes, less where the policy found them likely (Rewarding the Unlikely, arXiv 2506.02355).

    r' = r (1 - beta (G - rank) / G) for the G samples of a group, ranked by log-prob from 1, the likeliest, to G. The
    least likely keeps its reward, the likeliest loses up to `beta` of it. Samples of equal log-prob share the mean of
    their ranks. A reward that is not positive stays: a smaller one would favour likely failures.

    Args:
        rewards: [B]; NaN stays, and its row is not ranked.
        log_prob: [B] of each whole sample under the policy that drew it.
        groups: [B] integer ids.
        beta: In [0, 1].

    Returns:
        Rewards [B], float32 at least, without a gradient.

    Raises:
        ValueError: `beta` out of range, a log-prob missing for a reward, or shapes that do not match.
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
