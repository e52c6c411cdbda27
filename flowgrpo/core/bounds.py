"""Clip bounds that are not constants: by a token's own probability, or by the balance of a whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..parts.ranges import Bound, Share
from .advantages import as_precise
from .surrogates import LOG_LIMIT, beyond, holds_back, per_column, pessimistic

Path = Sequence[tuple[float, float]]


def _dcpo_bounds(log_ratio: Tensor, logp: Tensor, low: float, high: float, most: float) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of each token's log-ratio; the upper bound is at most `log(most)`."""
    rarity = 4 * (log_ratio - logp).detach().clamp(max=3 * LOG_LIMIT).exp()
    above = high * rarity
    # This form of sqrt(1 + x) - 1 avoids a difference of two numbers near 1.
    upper = torch.log1p(0.5 * above / ((1 + above).sqrt() + 1))
    lower = torch.log1p(0.5 * ((1 - low * rarity).clamp(min=0).sqrt() - 1))
    return lower, upper.clamp(max=math.log(most))


def _dcpo_holds_back(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, low: float, high: float, most: float
) -> Tensor:
    bounds = _dcpo_bounds(log_ratio, logp, low, high, most)
    return beyond(log_ratio, adv, *bounds) | ((adv < 0) & (log_ratio > math.log(most)))


@holds_back(_dcpo_holds_back)
def dcpo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    low: Bound = 0.16,
    high: Bound = 0.2,
    most: Bound = 10.0,
) -> Tensor:
    """Clip whose bounds are wider for tokens that were rarer (DCPO, arXiv 2509.02333).

    Let q be the token's old probability. The ratio is bounded where (r - 1) times the *new* probability r q reaches a
    constant, -low <= (r - 1) r q <= high:

        1/2 + sqrt(max(1 - 4 low / q, 0)) / 2  <=  r  <=  1/2 + sqrt(1 + 4 high / q) / 2,

    As in PPO, the sign of A decides which bound applies. For either sign, a ratio above `most` counts as `most` (the
    paper's dual clip). q is computed as exp(logp - log_ratio). So use `level="token"` and log-probs of tokens: a
    density has no such bound.

    Options:
        low: width of the lower bound at a probability of 1.
        high: width of the upper bound at a probability of 1.
        most: greatest ratio that counts, whatever the sign of the advantage.

    Raises:
        ValueError: If `low` or `high` is negative or `most` is not above 1.
    """
    if not (low >= 0 and high >= 0 and most > 1):
        raise ValueError(f"DCPO bounds are low={low}, high={high}, most={most}; use low, high >= 0 and most > 1")
    adv = per_column(adv)
    ceiling = math.log(most)
    bounded = pessimistic(log_ratio, adv, *_dcpo_bounds(log_ratio, logp, low, high, most))
    return -adv * torch.where((adv < 0) & (bounded > ceiling), ceiling, bounded).exp()


def _bapo_holds_back(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, lower: Tensor | float, upper: Tensor | float
) -> Tensor:
    return beyond(log_ratio, adv, *_logs(lower, upper))


def _logs(*bounds: Tensor | float) -> list[Tensor | float]:
    return [bound.log() if isinstance(bound, Tensor) else math.log(bound) for bound in bounds]


@holds_back(_bapo_holds_back)
def bapo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    lower: Share = 0.6,
    upper: Bound = 1.2,
) -> Tensor:
    """PPO's clip between two ratios; each is one number, or a tensor [B, T] with a bound for each column.

    With the bounds of `balanced_bounds` this is BAPO (arXiv 2510.18927); the defaults are where its search starts.
    `logp` is not used.

    Options:
        lower: least ratio that counts, at most 1.
        upper: greatest ratio that counts, at least 1.

    Raises:
        ValueError: If a bound that is a number is on the wrong side of 1.
    """
    if not isinstance(lower, Tensor) and not 0 < lower <= 1:
        raise ValueError(f"`lower` is {lower}; use a ratio in (0, 1]")
    if not isinstance(upper, Tensor) and not upper >= 1:
        raise ValueError(f"`upper` is {upper}; use a ratio of at least 1")
    adv = per_column(adv)
    return -adv * pessimistic(log_ratio, adv, *_logs(lower, upper)).exp()


MOST_PAIRS = 1000
"""Largest number of pairs of bounds: the memory for a batch grows with it."""


def balance_path(
    *,
    lower: tuple[float, float] = (0.6, 0.9),
    upper: tuple[float, float] = (1.2, 3.0),
    lower_step: float = 0.02,
    upper_step: float = 0.05,
) -> list[tuple[float, float]]:
    """Pairs of bounds (lower, upper) that BAPO tries in turn.

    First the upper bound rises to its end, so more of the good tokens count. Then the lower bound rises, so fewer of
    the bad tokens count. (The released code moves the lower bound first.)

    Args:
        lower: first and last lower bound of the ratio, above 0, rising.
        upper: first and last upper bound, rising.
        lower_step: how far the lower bound moves at a time, above 0.
        upper_step: how far the upper bound moves at a time, above 0.

    Raises:
        ValueError: if bounds are out of order, a step is not positive, or there are more than `MOST_PAIRS` pairs.
    """
    if not (0 < lower[0] <= lower[1] <= 1 <= upper[0] <= upper[1] < math.inf):
        raise ValueError(f"bounds are lower={lower}, upper={upper}; use 0 < lower <= 1 <= upper, each rising")
    if not (lower_step > 0 and upper_step > 0):
        raise ValueError(f"steps are lower_step={lower_step}, upper_step={upper_step}; use positive numbers")
    count = (upper[1] - upper[0]) / upper_step + (lower[1] - lower[0]) / lower_step
    if count > MOST_PAIRS:
        raise ValueError(
            f"lower_step={lower_step}, upper_step={upper_step} make {count:.3g} pairs of bounds, and every batch is "
            f"compared under each; use larger steps, for at most {MOST_PAIRS} pairs"
        )
    highs, lows = _rising(*upper, upper_step), _rising(*lower, lower_step)
    return [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]


def _rising(first: float, last: float, step: float) -> list[float]:
    count = math.ceil((last - first) / step - 1e-9)
    return [*(first + i * step for i in range(count)), last]


def balance_sums(log_ratio: Tensor, adv: Tensor, mask: Tensor | None, path: Path) -> Tensor:
    """Contribution of good tokens, and of all tokens, to the gradient under each pair of bounds.

    The contribution of a column is |A| r if the clip leaves it a gradient, and 0 otherwise. (The released code uses the
    clipped *value*. With the clipped value, a higher lower bound would make the bad tokens count more.) The result adds
    over micro-batches and ranks.

    Args:
        log_ratio: [B, T]; only its value is used.
        adv: [B] or [B, T].
        mask: [B, T] bool or 0/1, None for all. Masked-out values may be NaN.
        path: K pairs of ratios (lower, upper), as `balance_path` gives them.

    Returns:
        [K, 2]: contribution of the columns with A > 0, and of all columns.
    """
    kept = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask.bool()
    ratio = torch.where(kept, as_precise(log_ratio), 0.0).exp()
    wide = torch.where(kept, as_precise(per_column(adv)), 0.0)
    weight = wide.abs() * ratio
    good = {u: (weight * ((wide > 0) & (ratio <= u))).sum() for _, u in path}
    bad = {low: (weight * ((wide < 0) & (ratio >= low))).sum() for low, _ in path}
    return torch.stack([torch.stack([good[upper], good[upper] + bad[low]]) for low, upper in path])


def balanced_bounds(sums: Tensor, path: Path, target: float = 0.5) -> tuple[Tensor, Tensor]:
    """The first bounds under which good tokens contribute at least `target` of the gradient (BAPO's search).

    Args:
        sums: [K, 2] of the whole optimizer step, from `balance_sums`.
        path: the K pairs of bounds that `sums` was made with.
        target: rho_0 in (0, 1); if no pair reaches it, the last pair is taken.

    Returns:
        Lower and upper bound of the ratio, tensors without dimensions, for `bapo`.

    Raises:
        ValueError: if `target` is out of range, or `path` has another length than `sums`.
    """
    if not 0 < target < 1:
        raise ValueError(f"`target` is {target}; use a share of the gradient in (0, 1), such as 0.5")
    if sums.shape != (len(path), 2):
        raise ValueError(
            f"`sums` has shape {tuple(sums.shape)}; give the result of `balance_sums` on the same {len(path)} pairs"
        )
    reached = sums[:, 0] >= target * sums[:, 1]
    last = torch.arange(len(path), device=sums.device) == len(path) - 1
    first = (reached | last).int().argmax()
    lower, upper = sums.new_tensor(list(path)).index_select(0, first[None])[0].unbind()
    return lower, upper
