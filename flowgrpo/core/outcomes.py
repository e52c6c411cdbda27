"""Advantages and weights from the distribution of the outcomes of a group: from its entropy and its quantiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import as_precise, group_advantages, group_index, group_moments, sum_by_group
from .grouped import Grouped, cells, grouped, one_per_row, standardised

FORMS = ("linear", "exponential")


def _entropy(index: Tensor, num_groups: int, ids: Tensor | Sequence[int], valid: Tensor, name: str) -> Tensor:
    """Entropy in nats of the ids in each group, and the number of valid rows: [M, 2]."""
    cell, count = cells(index, ids, name)
    weight = as_precise(valid)[:, None]
    size = sum_by_group(weight, index, num_groups)
    share = sum_by_group(weight, cell, count)[cell] / size[index]
    # Each row adds -log(share) / size. Over the rows of an outcome this adds up to -share log(share).
    surprise = torch.where(weight > 0, -share.log(), 0.0)
    return torch.cat([sum_by_group(surprise, index, num_groups) / size.clamp(min=1), size], dim=1)


def outcome_entropy(
    outcomes: Tensor | Sequence[int], groups: Tensor | Sequence[int], *, valid: Tensor | None = None
) -> Tensor:
    """Entropy of the outcomes of each row's group, in nats: -sum over outcomes of share * log(share).

    Args:
        outcomes: [B] integer ids, such as the cluster of answers with one meaning.
        groups: [B] integer ids.
        valid: [B] bool, rows that count; None for all.

    Returns:
        [B] in 0..log(size of the group). All rows of a group have one value, and it is 0 if none of the rows counts.

    Raises:
        ValueError: If shapes do not match.
    """
    ids = torch.as_tensor(outcomes)
    index, count = group_index(groups, len(ids), ids.device)
    kept = torch.ones_like(index, dtype=torch.bool) if valid is None else one_per_row(valid, len(ids), "valid")
    return _entropy(index, count, ids, kept.to(ids.device).bool(), "outcomes")[index, 0].to(torch.float32)


def semantic_entropy_weights(
    clusters: Tensor | Sequence[int],
    groups: Tensor | Sequence[int],
    *,
    alpha: float = 1.0,
    form: str = "linear",
    valid: Tensor | None = None,
) -> Tensor:
    """Factor for the advantages of a prompt, small where its answers disagree (SEED-GRPO, arXiv 2505.12346).

    H is the entropy of the clusters of meaning in the group, and x = H / log(size) is in [0, 1]. The factor is 1 -
    alpha x ("linear") or exp(-alpha x) ("exponential"). A group of one has x = 0. The paper weights clusters by the
    probability of their answers; here all answers count equally.

    Args:
        clusters: [B] integer ids of the meaning of each answer.
        groups: [B] integer ids.
        alpha: Strength of the reduction where answers disagree: in [0, 1] for "linear", not negative for "exponential".
        form: "linear" or "exponential".
        valid: [B] bool, rows that count; None for all.

    Returns:
        [B] in [0, 1]; multiply advantages by it.

    Raises:
        ValueError: For an unknown `form`, `alpha` out of range, or shapes that do not match.
    """
    if form not in FORMS:
        raise ValueError(f"`form` is {form!r}; use one of {', '.join(FORMS)}")
    if alpha < 0 or (form == "linear" and alpha > 1):
        raise ValueError(f"`alpha` is {alpha}; use 0 or more, and 1 at most with form='linear'")
    ids = torch.as_tensor(clusters)
    index, count = group_index(groups, len(ids), ids.device)
    kept = torch.ones_like(index, dtype=torch.bool) if valid is None else one_per_row(valid, len(ids), "valid")
    entropy, size = _entropy(index, count, ids, kept.to(ids.device).bool(), "clusters").unbind(1)
    relative = entropy / size.clamp(min=2).log()
    factor = 1.0 - alpha * relative if form == "linear" else (-alpha * relative).exp()
    # A sum of logs is rounded differently from log(size). Rounding must not make a factor of 0 negative.
    return factor.clamp(min=0.0)[index].to(torch.float32)


def consistency_advantages(
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    *,
    sharpness: float = 10.0,
    threshold: float = 0.3,
    outcomes: Tensor | Sequence[int] | None = None,
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """Advantages that compare with the batch instead of the group where a group agrees (COPO, arXiv 2508.04138).

    A = w L + (1 - w) G with w = sigmoid(sharpness * (H - threshold)) for the entropy H of the group's outcomes, in
    nats. L compares a reward with its group. G compares the mean reward of the group with the mean rewards of the other
    groups. So a group of equal rewards still learns whether it did well. The abstract has no equations; this is its
    plainest form, and the defaults are ours (two outcomes have an H of 0.69 at most).

    Args:
        rewards: [B]. A NaN enters no statistic and gets advantage 0.
        groups: [B] integer ids. Gather the batch first if it is spread over ranks.
        sharpness: How fast the weight w changes with the entropy, not negative.
        threshold: Entropy at which L and G have the same weight.
        outcomes: [B] integer ids of the answers; with None, equal rewards are equal outcomes.
        eps: Added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        Advantages [B], float32 at least.

    Raises:
        ValueError: If `sharpness` is negative, or as in `group_advantages`.
    """
    if sharpness < 0:
        raise ValueError(f"`sharpness` is {sharpness}; use 0 or more")
    data = grouped(rewards, groups)
    one_per_row(rewards, len(rewards), "rewards")
    valid = ~data.values[:, 0].isnan()
    answers = torch.unique(data.values[:, 0], return_inverse=True)[1] if outcomes is None else outcomes
    entropy = _entropy(data.index, data.count, answers, valid, "outcomes")[:, :1]
    moments = data.moments(ddof)
    level = torch.where(moments.count > 0, moments.minimum + moments.offset, torch.nan)
    batch = torch.zeros_like(data.index[:1]).expand(data.count)
    whole = standardised(level, batch, group_moments(level, batch, 1, ddof), eps)
    share = torch.sigmoid(sharpness * (entropy - threshold))[data.index]
    own = standardised(data.values, data.index, moments, eps)
    return data.restore(share * own + (1.0 - share) * whole[data.index])


def exponential_advantages(rewards: Tensor, groups: Tensor | Sequence[int], *, sharpness: float = 1.0) -> Tensor:
    """Weights of good samples minus weights of bad ones, both exponential in the reward (wd1, arXiv 2507.08838).

    With a = reward - mean of the group, w+ = softmax(sharpness a) and w- = softmax(-sharpness a) over the group, and
    the advantage is G (w+ - w-) for a group of G. So a plain log-likelihood loss, without a ratio, is wd1's loss. The
    sum over a group is 0.

    Args:
        rewards: [B]. A NaN enters no group and gets advantage 0.
        groups: [B] integer ids.
        sharpness: Factor of the rewards in the exponent, above 0.

    Returns:
        Advantages [B], float32 at least.

    Raises:
        ValueError: If `sharpness` is not above 0, or as in `group_advantages`.
    """
    if not sharpness > 0:
        raise ValueError(f"`sharpness` is {sharpness}; use a number above 0")
    data = grouped(rewards, groups)
    one_per_row(rewards, len(rewards), "rewards")
    moments, valid = data.moments(0), ~data.values.isnan()
    gap = torch.where(valid, data.values - (moments.minimum + moments.offset)[data.index], 0.0)
    shares = []
    for sign in (1.0, -1.0):
        # The largest exponent of a group is subtracted by its mean: rewards of one group are close to each other.
        mass = torch.where(valid, (sign * sharpness * gap).clamp(max=80.0).exp(), 0.0)
        shares.append(mass / sum_by_group(mass, data.index, data.count).clamp(min=1e-300)[data.index])
    found = moments.count[data.index] * (shares[0] - shares[1])
    return data.restore(torch.where(valid, found, torch.nan))


def _quantile(data: Grouped, level: float) -> Tensor:
    """[M, K] for each group, the smallest of its values v for which a share `level` of its values is v or less."""
    ordered = data.values.where(~data.values.isnan(), torch.inf)
    first = ordered.argsort(dim=0, stable=True)
    order = first.gather(0, data.index[first].argsort(dim=0, stable=True))
    size = sum_by_group(torch.ones_like(data.values[:, :1]), data.index, data.count)
    count = data.moments(0).count
    # Because of rounding, a product such as 0.07 * 100 is above the whole number that it should be.
    place = (count * level - 1e-6).ceil().clamp(min=1) - 1 + size.cumsum(0) - size
    return ordered.gather(0, order).gather(0, place.long())


def quantile_advantages(
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    *,
    low: float = 0.2,
    high: float = 0.8,
    omega: float = 1.0,
    scale: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """Advantages that give regions of the reward distribution different weights (RiskPO, arXiv 2510.00911).

    The objective is a Mixed Value-at-Risk: (1 + omega) times the integral of the quantile function over [0, low], plus
    the integral over [low, high]. With the quantiles q of the group, and up to a baseline, its policy gradient has the
    weight u(r) = (1 + omega) min(r - q_low, 0) + clamp(r, q_low, q_high). The worst samples count 1 + omega times, and
    all samples above `high` count the same. The result is `group_advantages` of u. With omega = 0 and high = 1 it is
    GRPO. With binary rewards few quantiles differ, so the paper first adds up the rewards of several prompts (a
    bundle).

    Args:
        rewards: [B] or [B, ...]; columns are independent. A NaN enters no statistic and gets advantage 0.
        groups: [B] integer ids of prompts or bundles.
        low: Level of the lower quantile, 0 to `high`.
        high: Level of the upper quantile, up to 1.
        omega: Additional weight of the worst samples, not negative.
        scale: As in `group_advantages`.
        eps: Added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        Advantages shaped like `rewards`, float32 at least.

    Raises:
        ValueError: If a level or `omega` is out of range, or as in `group_advantages`.
    """
    if not 0.0 <= low < high <= 1.0:
        raise ValueError(f"`low` is {low} and `high` is {high}; use 0 <= low < high <= 1")
    if omega < 0:
        raise ValueError(f"`omega` is {omega}; use 0 or more")
    data = grouped(rewards, groups)
    bottom = _quantile(data, low)[data.index]
    top = _quantile(data, high)[data.index]
    above = data.values - bottom
    utility = (1.0 + omega) * above.clamp(max=0.0) + above.clamp(min=0.0).minimum(top - bottom)
    return data.restore(group_advantages(utility, data.index, scale=scale, eps=eps, ddof=ddof))
