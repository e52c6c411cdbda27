"""Choices about groups: which samples to train on, when to stop sampling, and which groups have nothing to teach.

Statistics and baselines should come from all samples that were drawn. So take `group_advantages` of all samples first,
and then the rows that are kept here. (`selection.select` keeps the best, or the best and the worst in equal parts.)
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
    """[N, 2] bool: successes and failures, compared in the precision of the rewards, so that 0.7 is not below 0.7."""
    return torch.stack([rewards >= success, rewards < success], 1)


def _checked_keep(keep: int) -> int:
    if keep < 1:
        raise ValueError(f"`keep` is {keep}; keep at least 1 sample of a group")
    return keep


def _count(chosen: Tensor, index: Tensor, count: int) -> Tensor:
    """[M, K] number of rows of `chosen` [N, K] in each group."""
    return sum_by_group(chosen.long(), index, count)


def rank_in_group(values: Tensor, index: Tensor, count: int) -> Tensor:
    """[N] place of each value in its group `index` [N]: 0 for the smallest, equal values in row order, NaN last."""
    order = values.argsort(stable=True)
    order = order[index[order].argsort(stable=True)]
    sizes = _count(torch.ones_like(index)[:, None], index, count)[:, 0]
    starts = sizes.cumsum(0) - sizes
    rank = torch.empty_like(index)
    rank[order] = torch.arange(len(index), device=index.device) - starts[index[order]]
    return rank


def widest(values: Tensor, groups: Tensor | Sequence[int], keep: int) -> Tensor:
    """Keep the `keep` samples of each group that have the greatest variance together (PODS, arXiv 2504.13818; D3S).

    This subset consists of the k highest and the `keep` - k lowest values for some k, so one sort and running sums find
    it. PODS uses rewards, and D3S ("Learning More with Less") uses advantages. Within one group both give the same
    subset.

    Args:
        values: [N]; NaN is never kept.
        groups: [N] integer ids.
        keep: samples to keep, at least 1; smaller groups are kept completely.

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
    # Values are taken about the mean, so that small differences are not lost in the squares.
    above = torch.where(valid, precise - (moments.minimum + moments.offset)[index, 0], 0.0)
    powers = torch.stack([above, above.square()], 1)

    def running(place: Tensor) -> Tensor:
        """[M, keep + 1, 2] sums over the first 0, 1, ... of the places."""
        table = powers.new_zeros(count, keep + 2, 2)
        # The last column takes the other rows.
        table[index, torch.where(valid & (place < keep), place + 1, keep + 1)] = powers
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
    """Which groups need no more samples: enough successes and failures, or `most` samples drawn (Reinforce-Ada).

    For successive elimination (arXiv 2510.04996), sample all groups for a round, drop the finished groups, and go on
    with the rest. `positives` = 1 and `negatives` = 0 stop at the first success. The paper's balanced rule sets both to
    half of the final group size.

    Args:
        rewards: [N] of all samples drawn; a NaN counts as a drawn sample, but as neither success nor failure.
        groups: [N] integer ids.
        positives: successes wanted.
        negatives: failures wanted.
        most: number of samples after which a group is finished in any case; None for no limit.
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
    """Keep `keep` samples of each group, half of them successes if there are enough (Reinforce-Ada, 2510.04996).

    If there are too few of one kind, the other kind fills the places. Of each kind, the samples that were drawn first
    are kept. If `keep` is odd, one more failure than successes is kept.

    Args:
        rewards: [N] in the order they were drawn; NaN is never kept.
        groups: [N] integer ids.
        keep: samples to keep, at least 1; smaller groups are kept completely.
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
    # Each kind is ranked alone: the samples of the other kind are NaN, and NaN ranks last.
    drawn = torch.arange(len(rewards), device=rewards.device, dtype=torch.float32)
    places = [rank_in_group(drawn.masked_fill(~kind, torch.nan), index, count) for kind in kinds.unbind(1)]
    return (kinds & (torch.stack(places, 1) < wanted)).any(1)


def degenerate_rows(
    rewards: Tensor, groups: Tensor | Sequence[int], *, which: str = "equal", success: float = 0.5
) -> Tensor:
    """[N] bool: rows of groups that have nothing to compare, or only failures, or only successes.

    The caller decides what to do with these rows: *keep* them (their group advantages are 0, but they count in
    `denom`), *skip* them (`mask=~degenerate_rows(...)`, so that they do not count in `denom` either, as in DAPO's
    dynamic sampling), *draw again* (`finished`), *repair* a failed group with a past success
    (`prompt_memory.Successes`), or give them another baseline (`anchored_advantages`).

    Args:
        rewards: [N]; NaN is left out, and a group that has only NaN is degenerate for every `which`.
        groups: [N] integer ids.
        which: "equal" for groups with fewer than two distinct rewards; "failed" for groups without a success; "solved"
            for groups without a failure.
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
