"""Which samples of a group to train on, when to stop sampling it, and which groups have nothing to teach.

Statistics, and so baselines, should come from all samples that were drawn: take `group_advantages` of all, then the
rows kept here. (`selection.select` keeps the best, or the best and the worst in equal parts.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import as_precise, group_index, group_moments, sum_by_group

KINDS = ("equal", "failed", "solved")


def _index(values: Tensor, groups: Tensor | Sequence[int]) -> tuple[Tensor, int]:
    if values.dim() != 1:
        raise ValueError(f"rewards have shape {tuple(values.shape)}; give one value per sample, (N,)")
    return group_index(groups, len(values), values.device)


def _kinds(rewards: Tensor, success: float) -> Tensor:
    """[N, 2] bool: successes and failures. In the rewards' own precision, where 0.7 is not below 0.7."""
    return torch.stack([rewards >= success, rewards < success], 1)


def _checked_keep(keep: int) -> int:
    if keep < 1:
        raise ValueError(f"`keep` is {keep}; keep at least 1 sample of a group")
    return keep


def _count(chosen: Tensor, index: Tensor, count: int) -> Tensor:
    """[M, K] how many of `chosen` [N, K] each group has."""
    return sum_by_group(chosen.long(), index, count)


def rank_in_group(values: Tensor, index: Tensor, count: int) -> Tensor:
    """[N] place of each value in its group `index` [N]: 0 for the smallest, equals in their order, NaN last."""
    order = values.argsort(stable=True)
    order = order[index[order].argsort(stable=True)]
    sizes = _count(torch.ones_like(index)[:, None], index, count)[:, 0]
    starts = sizes.cumsum(0) - sizes
    rank = torch.empty_like(index)
    rank[order] = torch.arange(len(index), device=index.device) - starts[index[order]]
    return rank


def widest(values: Tensor, groups: Tensor | Sequence[int], keep: int) -> Tensor:
    """Keep the `keep` samples of each group whose variance is greatest (PODS, arXiv 2504.13818; D3S).

    Such a subset is some number k of the highest and the `keep` - k lowest, so one sort and running sums find it. D3S
    ("Learning More with Less") takes it of advantages, PODS of rewards: the same for advantages of one group.

    Args:
        values: [N]; NaN is never kept.
        groups: [N] integer ids.
        keep: samples to keep, at least 1; smaller groups are kept whole.

    Returns:
        [N] bool.

    Raises:
        ValueError: For a `keep` below 1 or shapes that do not match.
    """
    keep = _checked_keep(keep)
    index, count = _index(values, groups)
    precise = as_precise(values)
    valid = ~precise.isnan()
    rank = rank_in_group(precise, index, count)
    present = _count(valid[:, None], index, count)[:, 0]
    moments = group_moments(precise[:, None], index, count, ddof=0)
    # About the mean, so that the squares do not swallow small differences.
    above = torch.where(valid, precise - (moments.minimum + moments.offset)[index, 0], 0.0)
    powers = torch.stack([above, above.square()], 1)

    def running(place: Tensor) -> Tensor:
        """[M, keep + 1, 2] sums over the first 0, 1, ... of the places."""
        table = powers.new_zeros(count, keep + 2, 2)
        table[index, torch.where(valid & (place < keep), place + 1, keep + 1)] = powers  # the last is for the others
        return table[:, :-1].cumsum(1)

    totals = running(present[index] - 1 - rank) + running(rank).flip(1)
    variance = totals[..., 1] / keep - (totals[..., 0] / keep).square()
    high = variance.argmax(1)[index]
    chosen = (rank >= present[index] - high) | (rank < keep - high)
    return (chosen | (present[index] <= keep)) & valid


def finished(
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    *,
    positives: int = 1,
    negatives: int = 1,
    most: int | None = None,
    success: float = 0.5,
) -> Tensor:
    """Which groups need no more samples: enough successes and enough failures, or too many drawn (Reinforce-Ada).

    Successive elimination (arXiv 2510.04996): sample all groups for a round, drop those that are finished, go on
    with the rest. `positives` = 1 and `negatives` = 0 stop at the first success; half of the final group size for
    both is the paper's balanced rule.

    Args:
        rewards: [N] of all samples drawn; a NaN counts as drawn only.
        groups: [N] integer ids.
        positives: successes wanted.
        negatives: failures wanted.
        most: samples after which a group is finished anyway; None to go on.
        success: the least reward of a success.

    Returns:
        [M] bool, in the order of the groups' ids.

    Raises:
        ValueError: If shapes do not match.
    """
    index, count = _index(rewards, groups)
    good, bad = _count(_kinds(rewards, success), index, count).unbind(1)
    enough = (good >= positives) & (bad >= negatives)
    if most is None:
        return enough
    return enough | (_count(torch.ones_like(index)[:, None], index, count)[:, 0] >= most)


def balanced(rewards: Tensor, groups: Tensor | Sequence[int], keep: int, *, success: float = 0.5) -> Tensor:
    """Keep `keep` samples of each group, half of them successes as far as there are (Reinforce-Ada, 2510.04996).

    Where one kind is short the other fills up; of each kind the first drawn are kept, and of an odd number one more
    failure.

    Args:
        rewards: [N] in the order they were drawn; NaN is never kept.
        groups: [N] integer ids.
        keep: samples to keep, at least 1; smaller groups are kept whole.
        success: the least reward of a success.

    Returns:
        [N] bool.

    Raises:
        ValueError: For a `keep` below 1 or shapes that do not match.
    """
    keep = _checked_keep(keep)
    index, count = _index(rewards, groups)
    kinds = _kinds(rewards, success)
    good, bad = _count(kinds, index, count).unbind(1)
    wanted = torch.minimum(good, (keep - bad).clamp(min=keep // 2))
    wanted = torch.stack([wanted, keep - wanted], 1)[index]
    # A kind is a group of its own; those of the other kind stand last, as NaN.
    drawn = torch.arange(len(rewards), device=rewards.device, dtype=torch.float32)
    places = [rank_in_group(drawn.masked_fill(~kind, torch.nan), index, count) for kind in kinds.unbind(1)]
    return (kinds & (torch.stack(places, 1) < wanted)).any(1)


def degenerate_rows(
    rewards: Tensor, groups: Tensor | Sequence[int], *, which: str = "equal", success: float = 0.5
) -> Tensor:
    """[N] bool: rows of groups that have nothing to compare, or nothing but failures, or nothing but successes.

    What to do with them is the caller's: *keep* them (their group advantages are 0, yet they count in `denom`),
    *skip* them (`mask=~degenerate_rows(...)`, so that they leave `denom` too, as DAPO's dynamic sampling), *draw
    again* (`finished`), *repair* a failed group with a past success (`replay.Successes`), or give them another
    baseline (`anchored_advantages`).

    Args:
        rewards: [N]; NaN is left out, and a group of nothing else is degenerate in every sense.
        groups: [N] integer ids.
        which: "equal", fewer than two distinct rewards; "failed", no success; "solved", no failure.
        success: the least reward of a success.

    Raises:
        ValueError: For an unknown `which` or shapes that do not match.
    """
    if which not in KINDS:
        raise ValueError(f"`which` is {which!r}; use one of {', '.join(KINDS)}")
    index, count = _index(rewards, groups)
    if which == "equal":
        return group_moments(as_precise(rewards)[:, None], index, count, ddof=0).degenerate[index, 0]
    good, bad = _count(_kinds(rewards, success), index, count)[index].unbind(1)
    return good == 0 if which == "failed" else bad == 0
