"""Ratios of units between a token and a row: sentences, ranks of a list, turns, blocks of denoising steps."""

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
from .surrogates import clip, held_back, holds_back, pooled_per_column


def _unit_sums(values: Tensor, units: Tensor, mask: Tensor) -> Tensor:
    """[B, T, K] sums of detached `values` [B, T, K] over the masked columns of each column's unit, float64."""
    if units.shape != mask.shape:
        raise ValueError(f"`units` has shape {tuple(units.shape)}; give one id per column, {tuple(mask.shape)}")
    rows = torch.arange(len(units), device=units.device)[:, None].expand_as(units)
    index, count = cells(rows.flatten(), units.flatten(), "units")
    kept = torch.where(mask.bool()[..., None], as_precise(values), 0.0)
    return sum_by_group(kept.flatten(0, 1), index, count)[index].reshape(kept.shape)


def pooled_per_unit(values: Tensor, units: Tensor, mask: Tensor) -> Tensor:
    """`x - sg(x) + sg(mean of x over the column's unit)`, [B, T]: `pooled_per_column` within parts of a row.

    Averaged over the masked columns of a unit, a function of this has the value and gradient of the same function
    of the unit's mean, yet each column's graph holds that column alone.

    Args:
        values: [B, T].
        units: [B, T] integer ids, any numbers; columns of one id in one row are a unit. Ignored outside `mask`.
        mask: [B, T] bool or 0/1.

    Raises:
        ValueError: If `units` is not shaped like `mask`.
    """
    sums = _unit_sums(torch.stack([values, torch.ones_like(values)], -1), units, mask)
    mean = (sums[..., 0] / sums[..., 1].clamp(min=1)).to(values.dtype)
    return values - values.detach() + mean


def unit_weights(units: Tensor, mask: Tensor) -> Tensor:
    """[B, T] weights that make every unit of a row count once, however long it is; 0 outside `mask`.

    As `weight` of `policy_loss` under `reduce="sequence"`: the loss is then the mean over rows of the mean over
    their units of the mean over the unit's columns (Rank-GRPO, arXiv 2510.20150).

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
    """The same surrogate on the geometric-mean ratio of each unit: a level between token and sequence.

    Rank-GRPO's rank of a list (arXiv 2510.20150), SSPO's sentence (2511.04256). Use it with `level="token"`, for
    one micro-batch: `policy_loss(..., surrogate=per_unit(clip, units))`.

    Args:
        surrogate: any of `flowgrpo.core.surrogates`, hyper-parameters bound.
        units: [B, T] integer ids of the micro-batch.
    """

    def rule(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Tensor | None:
        return held_back(surrogate, pooled_per_unit(log_ratio, units, mask), adv, logp, mask)

    @holds_back(rule)
    def pooled(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        return surrogate(pooled_per_unit(log_ratio, units, mask), adv, logp, mask)

    return pooled


def _sspo_clipped(
    log_ratio: Tensor, mask: Tensor, units: Tensor, entropy: Tensor, mean_entropy: Tensor | float, low: float,
    high: float, spread: float,
) -> Callable[..., Tensor]:  # fmt: skip
    """`bapo` of the units, between the bounds that each has by its entropy."""
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
    Need("task", ("text",), "widens the clip of an uncertain sentence, and the steps of images are alike in that"),
    Need("objective.level", ("part",), "clips the ratios of parts", task="text"),
    several_updates("differs by its clip alone, and a clip has an effect where the policy has moved"),
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

    The clip of a unit is [1 - c low, 1 + c high] with c = its mean entropy over `mean_entropy`, kept in
    [1 / spread, spread]. The paper's scaling is not in its abstract; this is the plainest that is 1 on average.

    Args:
        log_ratio: [B, T] of the tokens.
        adv: [B] or [B, T].
        logp: [B, T].
        mask: [B, T].
        units: [B, T] integer ids of the micro-batch.
        entropy: [B, T] of the policy that sampled.
        mean_entropy: over the whole step, above 0.
        low: lower clip of a unit of average entropy, in [0, 1).
        high: upper clip of such a unit.
        spread: at least 1; 1 switches the scaling off.

    Raises:
        ValueError: a clip or `spread` out of range, or no positive ratio left as a lower bound.
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

    (1 - mix) clip(token ratio) + mix clip(row's geometric mean). Use `level="token"`. `logp` is not used.

    Args:
        log_ratio: [B, T].
        adv: [B] or [B, T].
        logp: [B, T].
        mask: [B, T].
        mix: share of the sequence's ratio, in [0, 1]; [B, T] for the entropy-guided mixing.
        low: lower clip of the token's ratio.
        high: upper clip of the token's ratio.
        row_low: lower clip of the row's.
        row_high: upper clip of the row's.
    """
    fine = clip(log_ratio, adv, logp, mask, low=low, high=high)
    coarse = clip(pooled_per_column(log_ratio, mask), adv, logp, mask, low=row_low, high=row_high)
    return (1 - mix) * fine + mix * coarse
