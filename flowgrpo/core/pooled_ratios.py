"""Ratios of units between a token and a row in size: sentences, ranks of a list, turns, blocks of denoising steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..parts.needs import Need, needs, several_updates
from ..parts.ranges import Bound, Given, NotNegative, Share
from .advantages import as_precise, sum_by_group
from .bounds import bapo
from .grouped import cells
from .surrogates import clip, held_back, holds_back, losses, pooled_per_column


def _unit_sums(values: Tensor, units: Tensor, mask: Tensor) -> Tensor:
    """[B, T, K] sums of detached `values` [B, T, K] over the masked columns of each column's unit, float64."""
    if units.shape != mask.shape:
        raise ValueError(f"`units` has shape {tuple(units.shape)}; give one id per column, {tuple(mask.shape)}")
    rows = torch.arange(len(units), device=units.device)[:, None].expand_as(units)
    index, count = cells(rows.flatten(), units.flatten(), "units")
    kept = torch.where(mask.bool()[..., None], as_precise(values), 0.0)
    return sum_by_group(kept.flatten(0, 1), index, count)[index].reshape(kept.shape)


def pooled_per_unit(values: Tensor, units: Tensor, mask: Tensor) -> Tensor:
    """`x - sg(x) + sg(mean of x over the column's unit)`, [B, T]: `pooled_per_column` for parts of a row.

    Take a function of the result and average it over the masked columns of a unit. The average has the value and the
    gradient of the same function of the unit's mean, but the graph of each column holds only that column.

    Args:
        values: [B, T].
        units: [B, T] integer ids, any numbers; the columns of a row that have the same id are a unit. Ignored outside
            `mask`.
        mask: [B, T] bool or 0/1.

    Raises:
        ValueError: If `units` is not shaped like `mask`.
    """
    sums = _unit_sums(torch.stack([values, torch.ones_like(values)], -1), units, mask)
    mean = (sums[..., 0] / sums[..., 1].clamp(min=1)).to(values.dtype)
    return values - values.detach() + mean


def unit_weights(units: Tensor, mask: Tensor) -> Tensor:
    """[B, T] weights with which every unit of a row counts once, whatever its length; 0 outside `mask`.

    Pass them as `weight` of `policy_loss` with `reduce="sequence"`. The loss is then a mean over columns within a unit,
    over units within a row, and over rows (Rank-GRPO, arXiv 2510.20150).

    Args:
        units: [B, T] integer ids.
        mask: [B, T] bool or 0/1.
    """
    kept = mask.bool()
    size = _unit_sums(torch.ones_like(units, dtype=torch.float32)[..., None], units, mask)[..., 0]
    share = torch.where(kept, 1 / size, 0.0)
    count = share.sum(1, keepdim=True)  # each unit adds up to 1
    return (share * kept.sum(1, keepdim=True) / count.clamp(min=1)).float()


def per_unit(surrogate: Callable[..., Tensor], units: Tensor) -> Callable[..., Tensor]:
    """A surrogate applied to the geometric-mean ratio of each unit, a level between token and sequence.

    A unit is a rank of a list in Rank-GRPO (arXiv 2510.20150), and a sentence in SSPO (2511.04256). Use it with
    `level="token"`, for one micro-batch: `policy_loss(..., surrogate=per_unit(clip, units))`.

    Args:
        surrogate: any function of `flowgrpo.core.surrogates`, with its hyper-parameters bound.
        units: [B, T] integer ids of the micro-batch.
    """

    def rule(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Tensor | None:
        return held_back(surrogate, pooled_per_unit(log_ratio, units, mask), adv, logp, mask)

    @holds_back(rule)
    def pooled(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        return losses(surrogate, pooled_per_unit(log_ratio, units, mask), adv, logp, mask)

    return pooled


def _sspo_clipped(
    log_ratio: Tensor, mask: Tensor, units: Tensor, entropy: Tensor, mean_entropy: Tensor | float, low: float,
    high: float, spread: float,
) -> Callable[..., Tensor]:  # fmt: skip
    """`bapo` of the units, with the bounds that follow from the entropy of each unit."""
    if not (low >= 0 and high >= 0 and spread >= 1 and low * spread < 1):
        raise ValueError(f"low={low}, high={high}, spread={spread}; use low, high >= 0, spread >= 1, low * spread < 1")
    own = pooled_per_unit(entropy.detach().to(log_ratio), units, mask)
    scale = (own / mean_entropy).nan_to_num(1.0).clamp(1 / spread, spread)
    return per_unit(partial(bapo, lower=1 - scale * low, upper=1 + scale * high), units)


def _sspo_holds_back(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor,
    *, units: Tensor, entropy: Tensor, mean_entropy: Tensor | float, low: float, high: float, spread: float,
) -> Tensor | None:  # fmt: skip
    clipped = _sspo_clipped(log_ratio, mask, units, entropy, mean_entropy, low, high, spread)
    return held_back(clipped, log_ratio, adv, logp, mask)


@needs(
    Need("task", ("text",), "widens the clip of uncertain sentences, and all steps of images are equally certain"),
    Need("objective.level", ("part",), "clips the ratios of parts", task="text"),
    several_updates("differs only in its clip, and a clip has no effect before the policy has moved"),
)
@holds_back(_sspo_holds_back)
def sspo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    units: Given[Tensor],
    entropy: Given[Tensor],
    mean_entropy: Given[Tensor | float],
    low: NotNegative = 0.2,
    high: NotNegative = 0.2,
    spread: NotNegative = 2.0,
) -> Tensor:
    """Surrogate of sentence ratios whose clip is wide where the sentence was uncertain (SSPO, arXiv 2511.04256).

    The clip of a unit is [1 - c low, 1 + c high]. Here c is the unit's mean entropy divided by `mean_entropy`, kept in
    [1 / spread, spread]. The paper's abstract does not give its scaling; this one is the plainest that is 1 on average.

    Args:
        log_ratio: [B, T] log-ratios of the tokens.
        adv: [B] or [B, T].
        logp: [B, T].
        mask: [B, T].
        units: [B, T] integer ids of the micro-batch.
        entropy: [B, T] entropies of the policy that sampled.
        mean_entropy: mean entropy over the whole step, above 0.
        low: lower clip of a unit of average entropy, in [0, 1).
        high: upper clip of a unit of average entropy.
        spread: at least 1; 1 switches the scaling off.

    Raises:
        ValueError: If a clip or `spread` is out of range, or low * spread is not below 1.
    """
    clipped = _sspo_clipped(log_ratio, mask, units, entropy, mean_entropy, low, high, spread)
    return clipped(log_ratio, adv, logp, mask)


def _dhpo_holds_back(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor,
    *, mix: Tensor | float, low: float, high: float, row_low: float, row_high: float,
) -> Tensor:  # fmt: skip
    fine = held_back(partial(clip, low=low, high=high), log_ratio, adv, logp, mask)
    row = pooled_per_column(log_ratio, mask)
    coarse = held_back(partial(clip, low=row_low, high=row_high), row, adv, logp, mask)
    assert fine is not None
    assert coarse is not None
    share = torch.as_tensor(mix, device=log_ratio.device)
    return (fine | (share == 1)) & (coarse | (share == 0))


@holds_back(_dhpo_holds_back)
def dhpo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    mix: Share = 0.5,
    low: Bound = 0.2,
    high: Bound = 0.2,
    row_low: Bound = 3e-4,
    row_high: Bound = 4e-4,
) -> Tensor:
    """Token and sequence ratios in one loss, each clipped before they are mixed (DHPO, arXiv 2601.05607).

    The loss is (1 - mix) clip(token ratio) + mix clip(geometric-mean ratio of the row). Use `level="token"`. `logp` is
    not used.

    Args:
        log_ratio: [B, T].
        adv: [B] or [B, T].
        logp: [B, T].
        mask: [B, T].
        mix: weight of the sequence's ratio, in [0, 1]; a tensor [B, T] for the entropy-guided mixing.
        low: lower clip of the token's ratio.
        high: upper clip of the token's ratio.
        row_low: lower clip of the row's ratio.
        row_high: upper clip of the row's ratio.
    """
    fine = clip(log_ratio, adv, logp, mask, low=low, high=high)
    coarse = clip(pooled_per_column(log_ratio, mask), adv, logp, mask, low=row_low, high=row_high)
    return (1 - mix) * fine + mix * coarse
