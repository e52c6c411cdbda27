"""Group-relative advantages: `(reward - baseline) / scale`, for ragged groups and missing rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BASELINES = ("mean", "loo", "length", "none")
SCALES = ("group", "batch", "none")


@dataclass(frozen=True)
class GroupMoments:
    """Statistics of the non-NaN values of every group, for N rows, K columns and M groups.

    The mean is kept as an offset above the minimum, so that equal values have a deviation of exactly 0.
    """

    count: Tensor  # [M, K] values that are not NaN
    minimum: Tensor  # [M, K] (+inf in an empty group)
    offset: Tensor  # [M, K] mean - minimum
    std: Tensor  # [M, K], 0 where count <= ddof
    degenerate: Tensor  # [M, K] bool: fewer than two distinct values


def precise(device: torch.device) -> torch.dtype:
    """Float64 if the device has it (MPS does not), so that the order of a sum hardly changes the result."""
    return torch.float32 if device.type == "mps" else torch.float64


def as_precise(values: Tensor) -> Tensor:
    """Values without a gradient, in the dtype that `precise` gives for their device."""
    return values.detach().to(precise(values.device))


def goodness(advantages: Tensor, bound: float) -> Tensor:
    """Advantages as numbers in [0, 1], of the same shape: 0 at -bound and below, 1 at bound and above."""
    return (advantages / (2.0 * bound) + 0.5).clamp(0.0, 1.0)


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "positive": lambda advantages: advantages.clamp(min=0.0),
    "negative": lambda advantages: advantages.clamp(max=0.0),
    "one": lambda advantages: (advantages > 0.0).to(advantages),
    "sign": torch.sign,
    "exponential": lambda advantages: -torch.exp(-advantages),
}
"""What becomes of advantages, by the names that recipes use; each returns a tensor of the same shape.

The first four are in the released code of DiffusionNFT (2509.16117). The last one is the transform of DDRL
(2512.04332): it never rewards a sample, and a bad sample counts for more than a good one.
"""


def sum_by_group(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Sum the rows of `values` [N, K] that share an `index` [N] in 0..M-1, into [M, K]."""
    return values.new_zeros(num_groups, *values.shape[1:]).index_add(0, index, values)


def group_moments(values: Tensor, index: Tensor, num_groups: int, ddof: int) -> GroupMoments:
    """Two-pass mean and standard deviation of `values` [N, K] in each group `index` [N]; NaN is left out."""
    valid = ~values.isnan()
    spread = index[:, None].expand_as(values)
    empty = values.new_full((num_groups, values.shape[1]), torch.inf)
    minimum = empty.scatter_reduce(0, spread, values.where(valid, torch.inf), "amin")
    maximum = (-empty).scatter_reduce(0, spread, values.where(valid, -torch.inf), "amax")
    count = sum_by_group(valid.to(values.dtype), index, num_groups)
    above = torch.where(valid, values - minimum[index], 0.0)
    offset = sum_by_group(above, index, num_groups) / count.clamp(min=1)
    deviation = torch.where(valid, above - offset[index], 0.0)
    variance = sum_by_group(deviation.square(), index, num_groups) / (count - ddof).clamp(min=1)
    return GroupMoments(count, minimum, offset, variance.sqrt(), ~(maximum > minimum))


def group_index(groups: Tensor | Sequence[int], rows: int, device: torch.device) -> tuple[Tensor, int]:
    """Number the distinct ids of `groups` [rows]; return (index [rows] in 0..M-1, M)."""
    ids = torch.as_tensor(groups, device=device)
    if ids.shape != (rows,):
        raise ValueError(
            f"`groups` has shape {tuple(ids.shape)} but there are {rows} rows of rewards; "
            f"give one group id per row, shape ({rows},)"
        )
    unique, index = torch.unique(ids, return_inverse=True)
    return index, unique.numel()


def _length_offset(above: Tensor, lengths: Tensor | None, index: Tensor, moments: GroupMoments) -> Tensor:
    """Length-weighted mean above the minimum, [M, K]; the plain mean if all lengths of a group are 0."""
    if lengths is None or lengths.shape != above.shape[:1]:
        got = None if lengths is None else tuple(lengths.shape)
        raise ValueError(
            f"baseline='length' needs `lengths` of shape ({len(above)},), the trained columns of each row; got {got}"
        )
    num_groups = len(moments.count)
    weight = torch.where(above.isnan(), 0.0, lengths.to(above)[:, None])
    total = sum_by_group(weight, index, num_groups)
    weighted = sum_by_group(weight * above.nan_to_num(0.0), index, num_groups)
    return torch.where(total > 0, weighted / total, moments.offset)


def _centre(
    values: Tensor, index: Tensor, moments: GroupMoments, baseline: str | Tensor, lengths: Tensor | None
) -> Tensor:
    """`values - baseline` [N, K]; NaN stays NaN."""
    if isinstance(baseline, Tensor):
        given = as_precise(baseline.to(values.device))
        if given.shape[:1] != values.shape[:1] or given[0].numel() not in (1, values.shape[1]):
            raise ValueError(
                f"`baseline` has shape {tuple(baseline.shape)}; give one value per row, ({len(values)},), "
                "or one per reward"
            )
        return values - given.reshape(len(values), -1)
    if baseline == "none":
        return values
    above = values - moments.minimum[index]
    if baseline == "length":
        return above - _length_offset(above, lengths, index, moments)[index]
    centred = above - moments.offset[index]
    if baseline == "loo":
        # r_i - mean of the others = n / (n - 1) * (r_i - mean). A group of one has no others and stays 0.
        factor = moments.count / (moments.count - 1).clamp(min=1)
        return centred * factor[index]
    return centred


def group_advantages(
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    *,
    baseline: str | Tensor = "mean",
    scale: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
    lengths: Tensor | None = None,
) -> Tensor:
    """Group-relative advantage `A = (reward - baseline) / (std + eps)` (GRPO, arXiv 2402.03300, §4.1.2).

    NaN rewards ("not applicable", rejected, truncated) enter no statistic and get advantage 0. Under a group baseline,
    a group of one and a group whose rewards are all equal get exactly 0. Equal rewards have no scale. So with
    `scale="group"` a group of equal rewards gets 0 under any baseline, and with `scale="batch"` a batch of equal
    rewards gets 0.

    Published settings of (ddof, eps): Flow-GRPO (0, 1e-4), TRL (1, 1e-4), DanceGRPO, MixGRPO and BranchGRPO
    (1, 1e-8), verl (1, 1e-6).

    Args:
        rewards: [B] or [B, ...], float or integer; columns (several rewards) are treated independently.
        groups: [B] integer ids, in any order; groups may differ in size.
        baseline: "mean" of the group; "loo", the mean of the others (RLOO, arXiv 2402.14740; LOOP,
            2503.00897); "length", the length-weighted mean (OPO, arXiv 2505.23585); "none"; or a tensor, [B] or shaped
            like `rewards` (ReMax, arXiv 2310.10505: the reward of the greedy sample).
        scale: "group" or "batch" divides by the standard deviation about the mean of the group or of all rows given
            here; "none" does not divide (Dr. GRPO, arXiv 2503.20783). If the batch is spread over ranks, gather it
            before "batch".
        eps: added to the standard deviation; unused with `scale="none"`.
        ddof: 1 for the sample standard deviation, 0 for the population one.
        lengths: [B] non-negative numbers of trained columns, for `baseline="length"`.

    Returns:
        Advantages shaped like `rewards`, float32 at least, without a gradient.

    Raises:
        ValueError: For an unknown choice, a shape that does not match, or an infinite reward.
    """
    if not isinstance(baseline, Tensor) and baseline not in BASELINES:
        raise ValueError(f"`baseline` is {baseline!r}; use one of {', '.join(BASELINES)}, or a tensor")
    if scale not in SCALES:
        raise ValueError(f"`scale` is {scale!r}; use one of {', '.join(SCALES)}")
    if rewards.dim() == 0:
        raise ValueError("`rewards` is a scalar; give one reward per row, shape (B,)")
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    if rewards.numel() == 0:
        return torch.zeros_like(rewards, dtype=dtype)
    values = as_precise(rewards).reshape(len(rewards), -1)
    if bool(values.isinf().any()):
        raise ValueError("`rewards` holds an infinite value; use NaN for a reward that does not apply")
    index, num_groups = group_index(groups, len(values), values.device)
    moments = group_moments(values, index, num_groups, ddof)
    centred = _centre(values, index, moments, baseline, lengths)
    silent = values.isnan()
    if scale == "group":
        silent = silent | moments.degenerate[index]
        centred = centred / (moments.std[index] + eps)
    elif scale == "batch":
        batch = group_moments(values, torch.zeros_like(index), 1, ddof)
        silent = silent | batch.degenerate
        centred = centred / (batch.std + eps)
    return torch.where(silent, 0.0, centred).to(dtype).reshape(rewards.shape)


def group_means(values: Tensor, groups: Tensor | Sequence[int]) -> Tensor:
    """The mean of its group, for each row.

    Args:
        values: [B] or [B, ...]; a NaN enters no mean, and stays NaN.
        groups: [B] integer ids.

    Raises:
        ValueError: As in `group_advantages`.
    """
    return values - group_advantages(values, groups, scale="none")


def anchored_advantages(
    values: Tensor, groups: Tensor | Sequence[int], *, k: float = 1.0, eps: float = 1e-4, ddof: int = 1
) -> Tensor:
    """Advantages that keep a signal where a group has lost its diversity (VGPO, arXiv 2512.12387).

    A = a R + (1 - a) L. R compares a value with its group, and L compares it with all groups. The share is a = min(1, k
    s / S) for the standard deviation s of the group and the standard deviation S of all values. A group of equal values
    has a = 0, and learns only from its level. The paper's equations are not public; the formula follows the abstract.

    Args:
        values: [B] or [B, T]; columns are independent. A NaN enters no statistic and gets advantage 0.
        groups: [B] integer ids.
        k: How soon the group's own comparison has its full weight, above 0.
        eps: Added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        Advantages shaped like `values`, float32 at least.

    Raises:
        ValueError: If `k` is not above 0, or as in `group_advantages`.
    """
    if not k > 0:
        raise ValueError(f"`k` is {k}; use a number above 0")
    dtype = torch.promote_types(values.dtype, torch.float32)
    if values.numel() == 0:
        return torch.zeros_like(values, dtype=dtype)
    rows = as_precise(values).reshape(len(values), -1)
    everything = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
    relative = group_advantages(rows, groups, eps=eps, ddof=ddof)
    level = group_advantages(rows, everything, eps=eps, ddof=ddof)
    index, count = group_index(groups, len(rows), rows.device)
    own, whole = group_moments(rows, index, count, ddof).std, group_moments(rows, everything, 1, ddof).std
    share = torch.where(whole > 0, k * own / whole, 1.0).clamp(max=1.0)[index]
    return (share * relative + (1.0 - share) * level).to(dtype).reshape(values.shape)


def filled_rewards(
    rewards: Tensor, groups: Tensor | Sequence[int], *, wider: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Rewards in which a missing reward has the mean of that reward over the rows of its group that have it.

    So a missing reward neither favours nor harms a row. Only this function decides how a missing score counts. All code
    that adds rewards up, or takes the least of them, calls it.

    Args:
        rewards: [B, K], NaN where a reward is missing.
        groups: [B] integer ids.
        wider: [B] integer ids of larger groups. Their mean is used where no row of the group has the reward. Give it
            for comparisons between groups: without it, a group that lacks a reward would seem worse or better than the
            others.

    Returns:
        [B, K], float32 at least, without a gradient. NaN stays in a row that has no reward at all, and where neither
        the group nor the wider one has the reward.
    """
    values = as_precise(rewards)
    found = values
    for ids in (groups, wider):
        if ids is None:
            continue
        index, count = group_index(ids, len(values), values.device)
        moments = group_moments(values, index, count, ddof=0)
        mean = torch.where(moments.count > 0, moments.minimum + moments.offset, torch.nan)
        found = torch.where(found.isnan(), mean[index], found)
    found = found.masked_fill(values.isnan().all(1, keepdim=True), torch.nan)
    return found.to(torch.promote_types(rewards.dtype, torch.float32))


def weighted_total(
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    weights: Tensor | Sequence[float],
    *,
    wider: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Weighted sum of K rewards, with missing rewards filled in by `filled_rewards`.

    A reward of weight 0 is ignored. A reward that neither the group nor the wider group has adds nothing.

    Args:
        rewards: [B, K], NaN where a reward is missing.
        groups: [B] integer ids.
        weights: [K].
        wider: As in `filled_rewards`.

    Returns:
        [B], float32 at least, without a gradient; NaN where a row has no reward with a weight other than 0.

    Raises:
        ValueError: For shapes that do not match.
    """
    total = _precise_total(*_counted(rewards, weights), groups, wider)
    return total.to(torch.promote_types(rewards.dtype, torch.float32))


def _precise_total(
    values: Tensor, factors: Tensor, groups: Tensor | Sequence[int], wider: Tensor | Sequence[int] | None = None
) -> Tensor:
    """`weighted_total` of the columns that count, not yet rounded."""
    total = _sum_of_columns(filled_rewards(values, groups, wider=wider).nan_to_num(0.0), factors)
    return total.masked_fill(values.isnan().all(1), torch.nan)


def _counted(rewards: Tensor, weights: Tensor | Sequence[float]) -> tuple[Tensor, Tensor]:
    """Precise columns of the rewards whose weight is not 0, and their weights."""
    factors = as_precise(torch.as_tensor(weights, device=rewards.device))
    if rewards.dim() != 2 or factors.shape != rewards.shape[1:]:
        raise ValueError(
            f"`rewards` has shape {tuple(rewards.shape)} and `weights` {tuple(factors.shape)}; "
            "give rewards (B, K) and one weight per reward, (K,)"
        )
    return as_precise(rewards)[:, factors != 0], factors[factors != 0]


def _sum_of_columns(columns: Tensor, weights: Tensor) -> Tensor:
    # Columns are added one after another, so that rows with equal rewards get equal sums to the last bit. A vectorised
    # reduction over columns does not guarantee this.
    total = columns.new_zeros(len(columns))
    for k in range(columns.shape[1]):
        total = total + weights[k] * columns[:, k]
    return total


def multi_reward_advantages(
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    weights: Tensor | Sequence[float],
    *,
    how: str = "sum",
    **kw: Any,
) -> Tensor:
    """Combine K rewards into one advantage per row.

    `how="sum"` takes `group_advantages` of the `weighted_total`. `how="each"` normalises each reward within its group
    and adds them with the weights (MixGRPO's code). `how="gdpo"` (reward-decoupled GDPO, arXiv 2601.05242) also whitens
    this sum over all rows. In all of them, a reward that is NaN for a row counts as the mean of its group, so it
    neither favours nor harms the row. With "each" and "gdpo" it counts as the mean of its group's advantages, which is
    0 under a group baseline. A reward of weight 0 is ignored. A row that has no other reward gets advantage 0 and
    enters no statistic.

    Args:
        rewards: [B, K], NaN where a reward does not apply.
        groups: [B] integer ids.
        weights: [K].
        how: "sum", "each" or "gdpo".
        **kw: Keyword arguments of `group_advantages`; `eps` and `ddof` also serve the whitening of "gdpo".

    Returns:
        Advantages [B].

    Raises:
        ValueError: For an unknown `how` or shapes that do not match.
    """
    if how not in ("sum", "each", "gdpo"):
        raise ValueError(f"`how` is {how!r}; use 'sum', 'each' or 'gdpo'")
    values, factors = _counted(rewards, weights)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    if values.numel() == 0:
        return torch.zeros(len(values), dtype=dtype, device=rewards.device)
    index, num_groups = group_index(groups, len(values), values.device)
    if how == "sum":
        # The standard deviation of the batch is about the mean of all groups, so a group that lacks a reward must not
        # seem different from the others.
        between = kw.get("scale") == "batch" and kw.get("baseline", "mean") in ("mean", "loo", "length")
        total = _precise_total(values, factors, index, torch.zeros_like(index) if between else None)
        return group_advantages(total, index, **kw).to(dtype)
    given = kw.get("baseline")
    if isinstance(given, Tensor) and given.dim() == 2 and given.shape[1] == rewards.shape[1]:
        kw["baseline"] = given[:, torch.as_tensor(weights, device=given.device) != 0]
    missing = values.isnan()
    each = group_advantages(values, index, **kw).masked_fill(missing, torch.nan)
    total = _precise_total(each, factors, index)
    if how == "each":
        return total.nan_to_num(0.0).to(dtype)
    whitening = {name: kw[name] for name in ("eps", "ddof") if name in kw}
    whitened = group_advantages(total, torch.zeros_like(index), **whitening)
    # Group advantages add up to 0 only up to rounding. Whitening would give a small signal to a group that has none.
    silent = group_moments(values, index, num_groups, ddof=1).degenerate.all(1)[index] & (total == 0)
    return whitened.masked_fill(silent, 0.0).to(dtype)
