"""Quantities that a run should watch: the drift of the ratio per denoising step, and groups without a signal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import as_precise, group_index, group_moments
from .objectives import broadcasts

SIGNS = ("pos", "neg")
COLUMNS = 5
"""Number of sums that `step_statistics` takes for each step and sign."""


def step_statistics(
    log_ratio: Tensor,
    step: Tensor,
    adv: Tensor,
    mask: Tensor | None,
    held: Tensor | None,
    num_steps: int,
) -> Tensor:
    """Sums behind GRPO-Guard's diagnosis (arXiv 2510.22319): the log-ratio by denoising step and sign of A.

    The result adds over micro-batches and ranks; `summarise` turns the total into means. Entries of advantage 0 are
    left out because they have no gradient.

    Args:
        log_ratio: [N], or [B, T]; only its value is used.
        step: Integer denoising step of each entry in 0..num_steps-1, broadcastable to `log_ratio`.
        adv: Advantage of each entry, broadcastable to `log_ratio` ([B, 1] for one advantage per row).
        mask: Entries to count, broadcastable; the other entries may be NaN. None counts all.
        held: Entries that have no gradient because of a bound (`objectives.held_columns`), broadcastable; None if there
            are no such entries.
        num_steps: Number of denoising steps.

    Returns:
        [num_steps, 2, 5]. The axes are the step, the sign (A > 0, then A < 0), and five sums: count, sum of log r, sum
        of (log r)^2, entries held back, sum of r - 1 - log r.

    Raises:
        ValueError: If a shape does not broadcast or a counted step is out of range.
    """
    ratio, steps, sign = (
        as_precise(log_ratio),
        step.to(log_ratio.device),
        as_precise(adv.to(log_ratio.device)),
    )
    kept = torch.ones_like(ratio, dtype=torch.bool) if mask is None else mask.to(ratio.device).bool()
    clipped = torch.zeros_like(kept) if held is None else held.to(ratio.device).bool()
    for name, values in (("step", steps), ("adv", sign), ("mask", kept), ("held", clipped)):
        if not broadcasts(values, ratio):
            raise ValueError(f"`{name}` has shape {tuple(values.shape)}, not broadcastable to {tuple(ratio.shape)}")
    steps, sign, kept, clipped = (values.expand_as(ratio).flatten() for values in (steps, sign, kept, clipped))
    kept = kept & (sign != 0) & ~sign.isnan()
    ratio = torch.where(kept, ratio.flatten(), 0.0)
    # The check runs on the CPU only, where it costs no synchronisation. An accelerator reports a bad index by itself.
    if ratio.device.type == "cpu" and bool((kept & ((steps < 0) | (steps >= num_steps))).any()):
        raise ValueError(f"`step` holds an index outside 0..{num_steps - 1}; pass `num_steps` of the whole schedule")
    divergence = ratio.expm1() - ratio
    entries = torch.stack([torch.ones_like(ratio), ratio, ratio.square(), clipped.to(ratio.dtype), divergence], 1)
    cell = torch.where(kept, 2 * steps.long() + (sign < 0), 0)
    total = ratio.new_zeros(2 * num_steps, COLUMNS).index_add(0, cell, entries * kept[:, None])
    return total.reshape(num_steps, 2, COLUMNS)


def summarise(stats: Tensor) -> dict[str, Tensor]:
    """Means of `step_statistics` [S, 2, 5], each a tensor [S]; NaN at a step with no entry.

    Keys over both signs: "log_ratio_mean", "log_ratio_var" (population), "ratio_mean", "approx_kl" (the mean of r - 1 -
    log r, an estimate of KL(old || new)) and "clip_share". The same keys with the ending "_pos" or "_neg" are for one
    sign of the advantage. The last key is "count".
    """
    views = {"": stats.sum(1), **{f"_{name}": stats[:, i] for i, name in enumerate(SIGNS)}}
    summary = {"count": stats[..., 0].sum(1)}
    for suffix, (count, first, second, clipped, above) in ((key, view.unbind(-1)) for key, view in views.items()):
        mean, divergence = first / count, above / count
        summary[f"log_ratio_mean{suffix}"] = mean
        summary[f"log_ratio_var{suffix}"] = (second / count - mean.square()).clamp(min=0)
        summary[f"ratio_mean{suffix}"] = 1 + mean + divergence
        summary[f"approx_kl{suffix}"] = divergence
        summary[f"clip_share{suffix}"] = clipped / count
    return summary


def degenerate_groups(rewards: Tensor, groups: Tensor | Sequence[int]) -> Tensor:
    """Count the groups without a learning signal, which have fewer than two distinct rewards; NaN is left out.

    Args:
        rewards: [B] or [B, K]. With several rewards, a group counts only if it is degenerate in every reward.
        groups: [B] integer ids.

    Returns:
        tensor([number of degenerate groups, number of groups]), a [sum, count] pair.
    """
    values = as_precise(rewards)
    if len(values) == 0:
        return values.new_zeros(2)
    values = values.reshape(len(values), -1)
    index, num_groups = group_index(groups, len(values), values.device)
    degenerate = group_moments(values, index, num_groups, ddof=1).degenerate.all(1)
    return torch.stack([degenerate.sum(), degenerate.new_tensor(num_groups, dtype=torch.long)]).to(values.dtype)


def rank_correlations(first: Tensor, second: Tensor, groups: Tensor | Sequence[int]) -> Tensor:
    """Spearman's rank correlation of two scores within each group, with mean ranks for equal values.

    Args:
        first: [N]. A row that is NaN in one of the scores is left out.
        second: [N].
        groups: [N] integer ids.

    Returns:
        [G] by group, in the order of the ids; NaN where a score has fewer than two distinct values.
    """
    index, count = group_index(groups, len(first), first.device)
    known = ~(first.isnan() | second.isnan())
    pairs = torch.stack([as_precise(first), as_precise(second)])

    def correlation(values: Tensor) -> Tensor:
        # How many values are smaller, less how many are greater, is 2 * rank - 1 - size, and its mean is 0.
        ranks = (values[:, :, None] - values[:, None]).sign().sum(2)
        return (ranks[0] * ranks[1]).sum() / (ranks.square().sum(1).prod()).sqrt()

    return torch.stack([correlation(pairs[:, known & (index == k)]) for k in range(count)])
