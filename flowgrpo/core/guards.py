"""Protection of tokens and rows: likelihoods that must not fall, tokens that good and bad rows share, stray rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import group_index, sum_by_group
from .grouped import cells
from .pooled_ratios import pooled_per_unit
from .surrogates import per_column, pooled_per_column

ALIGNMENTS = ("start", "end")


def likelihood_guard(
    logp: Tensor,
    old_logp: Tensor,
    mask: Tensor | None = None,
    adv: Tensor | None = None,
    *,
    units: Tensor | None = None,
) -> Tensor:
    """Penalty `max(0, log pi_old - log pi)` on the columns of rows that became less likely (LLDS, arXiv 2512.04220).

    A row is guarded as soon as its summed log-prob is below its summed log-prob under the old policy. In a guarded row,
    only columns whose own log-prob fell are pushed back up. Multiply the result by a coefficient and pass it as
    `penalty` of `policy_loss`.

    Args:
        logp: [B, T], with gradient.
        old_logp: [B, T] log-probs under the policy that sampled.
        mask: [B, T] bool or 0/1, None for all. Masked-out columns may be NaN or infinite, and get 0.
        adv: [B] or [B, T], to guard only columns of A > 0, the correct answers; None guards all columns.
        units: [B, T] integer ids of units, such as actions. If given, the sum of each unit decides instead of the row's
            sum.

    Returns:
        [B, T], non-negative.

    Raises:
        ValueError: If shapes do not match.
    """
    if logp.dim() != 2 or logp.shape != old_logp.shape:
        raise ValueError(
            f"`logp` has shape {tuple(logp.shape)}, `old_logp` {tuple(old_logp.shape)}; give both as (B, T)"
        )
    kept = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask.bool()
    fall = torch.where(kept, old_logp.detach(), 0.0) - torch.where(kept, logp, 0.0)
    fixed = fall.detach()
    mean = pooled_per_column(fixed, kept) if units is None else pooled_per_unit(fixed, units, kept)
    guarded = kept & (mean > 0)
    if adv is not None:
        guarded = guarded & (per_column(adv) > 0)
    return torch.where(guarded, fall, 0.0).relu()


def conflict_weights(
    tokens: Tensor,
    adv: Tensor,
    groups: Tensor | Sequence[int],
    mask: Tensor,
    *,
    boost: float = 2.0,
    align: str = "start",
) -> Tensor:
    """Weights that do not punish a token if good answers have it at the same position (GTPO, arXiv 2508.03772).

    A token is in conflict if completions of one prompt with A > 0 and with A < 0 both have it at one position. Its
    weight is then 0 where A < 0 and `boost` where A > 0; all other weights are 1. Pass them as `weight` of
    `policy_loss`. The paper protects shared beginnings and shared endings: there, a token is in conflict if either
    alignment says so.

    Args:
        tokens: [B, T] integer ids, right-padded.
        adv: [B].
        groups: [B] integer ids; whole groups.
        mask: [B, T] bool or 0/1.
        boost: weight of a token in conflict where A > 0, at least 1.
        align: "start" or "end", from which positions are counted.

    Returns:
        [B, T] float32; 1 outside `mask`.

    Raises:
        ValueError: For an unknown `align`, a `boost` below 1, or shapes that do not match.
    """
    if align not in ALIGNMENTS:
        raise ValueError(f"`align` is {align!r}; use one of {', '.join(ALIGNMENTS)}")
    if not boost >= 1:
        raise ValueError(f"`boost` is {boost}; use 1 or more")
    kept = mask.bool()
    if tokens.shape != kept.shape or adv.shape != tokens.shape[:1]:
        raise ValueError(
            f"`tokens` has shape {tuple(tokens.shape)}, `mask` {tuple(kept.shape)}, `adv` {tuple(adv.shape)}; "
            "give (B, T), (B, T) and (B,)"
        )
    index, _ = group_index(groups, len(tokens), tokens.device)
    position = kept.long().cumsum(1)
    if align == "end":
        position = position - kept.sum(1, keepdim=True)
    place, _ = cells(index[:, None].expand_as(tokens).flatten(), position.flatten(), "position")
    token, count = cells(place, tokens.flatten(), "tokens")
    sign = adv.sign()[:, None].expand_as(tokens)
    seen = torch.stack([kept & (sign > 0), kept & (sign < 0)], -1).flatten(0, 1).float()
    conflict = (sum_by_group(seen, token, count) > 0).all(1)[token].view_as(kept) & kept
    return torch.where(conflict, torch.where(sign > 0, boost, torch.where(sign < 0, 0.0, 1.0)), 1.0)


def confident_rows(entropy: Tensor, mask: Tensor, limit: float = math.log(2)) -> Tensor:
    """[B] bool: rows whose mean entropy over `mask` is at most `limit` nats; GTPO trains on them (arXiv 2508.03772).

    Args:
        entropy: [B, T]; NaN outside `mask` does not matter.
        mask: [B, T] bool or 0/1; a row without a column counts as confident.
        limit: Largest mean entropy in nats. The paper uses log 2: above log 2, it can happen that no token has half of
            the probability.
    """
    kept = mask.bool()
    return torch.where(kept, entropy, 0.0).sum(1) / kept.sum(1).clamp(min=1) <= limit


def stray_weights(fall: Tensor, adv: Tensor, mask: Tensor, limit: float) -> Tensor:
    """[B, T] weights: 0 for A < 0 in rows that the policy has left, else 1 (DeepSeek-V3.2, arXiv 2512.02556, Eq. 9).

    The policy learns most from its own mistakes. A bad row that it would hardly write again says little about it, and
    pushes it away from where it is not.

    Args:
        fall: [B, T] log-prob when the row was sampled, minus the log-prob now; NaN outside `mask` does not matter.
        adv: [B] or [B, T].
        mask: [B, T] bool or 0/1.
        limit: mean of `fall` over a row's columns above which the policy has left the row.
    """
    kept = mask.bool()
    mean = torch.where(kept, fall.detach(), 0.0).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
    return torch.where((mean > limit) & (per_column(adv) < 0), 0.0, 1.0).expand_as(fall)
