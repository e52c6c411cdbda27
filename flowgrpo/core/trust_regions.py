"""Surrogates whose trust region is held by a pull back to its border, or is in a token's probability."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..parts.needs import Need, needs
from ..parts.ranges import Bound, Fraction, Positive
from .surrogates import LOG_LIMIT, beyond, beyond_limit, holds_back, per_column

ALONE = "compares the probabilities of single tokens"
OF_TOKENS = (
    Need("task", ("text",), ALONE, mend="use another surrogate, such as clip"),
    Need("objective.level", ("token",), ALONE, task="text"),
)
"""A denoising step has a density and no probability, and the mean over a row is the probability of no token."""


def old_probability(log_ratio: Tensor, logp: Tensor) -> Tensor:
    """[B, T] probability of each token under the policy that sampled, without gradient."""
    return (logp - log_ratio).detach().exp()


def _tokens_if_by_probability(recipe: Any, choice: Any) -> list[str]:
    if choice["by"] != "probability":
        return []
    who = f"surrogate {choice.short} with by: probability"
    return [fault for need in OF_TOKENS if (fault := need.fault(recipe, who))]


@needs(_tokens_if_by_probability)
@holds_back(beyond_limit)
def spo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    epsilon: Positive = 0.2,
    by: Literal["ratio", "probability"] = "ratio",
) -> Tensor:
    """Plain ratio with a pull to a border, `-A r + |A| q / (2 epsilon) (r - 1)^2` (SPO 2401.16025, DRPO 2606.09821).

    With `by: ratio`, q is 1, and this is SPO's loss. The weight of the gradient is 1 - sign(A (r - 1)) |r - 1| /
    epsilon. It falls to 0 at the border |r - 1| = epsilon. Beyond the border it is below 0, so the gradient pulls back,
    and nothing is held back. With `by: probability`, q is the token's old probability, and this is DRPO's loss. With
    the new probability p = q r, the border is |p - q| = epsilon. DRPO's published epsilon is 12.5, a border that no
    probability reaches: its weight stays between 0.92 and 1.08. The log-ratio is bounded at 20. Except for q, `logp` is
    not used.

    Options:
        epsilon: distance of the border from where the policy was.
        by: what the distance is measured in: `ratio`, or `probability` of the token.

    Raises:
        ValueError: If `epsilon` is not positive.
    """
    if not epsilon > 0:
        raise ValueError(f"`epsilon` is {epsilon}; use a positive distance of the border, such as 0.2")
    adv = per_column(adv)
    excess = log_ratio.clamp(max=LOG_LIMIT).expm1()
    pull = adv.abs() * excess.square() / (2 * epsilon)
    return -adv * (excess + 1) + (pull if by == "ratio" else pull * old_probability(log_ratio, logp))


def _weighed(log_ratio: Tensor, adv: Tensor, logp: Tensor, left_out: Tensor, most: float) -> Tensor:
    """`-A sg(min(r, most)) logp`, and 0 for what is left out."""
    weight = log_ratio.detach().clamp(max=min(math.log(most), LOG_LIMIT)).exp()
    return torch.where(left_out, 0.0, -adv * weight * logp)


def _dppo_holds_back(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, low: float, high: float, divergence: str, most: float
) -> Tensor:
    new, old = logp.detach().exp(), old_probability(log_ratio, logp)
    moved = new - old
    if divergence == "kl":
        # Rounding may give a probability above 1, and the small number keeps the logarithm finite at 1.
        rests = [(1 - one).clamp(min=0) + 1e-8 for one in (old, new)]
        moved = moved.sign() * ((1 - old) * (rests[0] / rests[1]).log() - old * log_ratio.detach())
    return beyond(moved, adv, -low, high)


@needs(*OF_TOKENS)
@holds_back(_dppo_holds_back)
def dppo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    low: Bound = 0.15,
    high: Bound = 0.15,
    divergence: Literal["tv", "kl"] = "tv",
    most: Bound = 10.0,
) -> Tensor:
    """Policy gradient that leaves out tokens whose probability has moved too far (DPPO, arXiv 2602.04879).

    With p the new and q the old probability of the sampled token, the token is left out where it would move further
    out: where A > 0 and p > q, or A < 0 and p < q, and the divergence is above its bound. The divergence is of two
    outcomes, the token and all others: |p - q| for `tv`, KL(q || p) for `kl`. All other tokens have the loss
    -A sg(min(r, most)) logp. So a rare token may move by a large ratio, and a likely one only by a small ratio. The
    published bounds are 0.15 for `tv`, and 0.05 for `kl`. `most` is 10 by default in the authors' code, too.

    Options:
        low: bound of the divergence where the advantage is below 0.
        high: bound of the divergence where the advantage is above 0.
        divergence: `tv` is the difference of the probabilities; `kl` is in nats.
        most: largest weight of a token, given as a ratio; `.inf` for no bound.

    Raises:
        ValueError: If `low` or `high` is negative or `most` is not positive.
    """
    if not (low >= 0 and high >= 0 and most > 0):
        raise ValueError(f"DPPO bounds are low={low}, high={high}, most={most}; use low, high >= 0 and most > 0")
    adv = per_column(adv)
    options: dict[str, Any] = {"low": low, "high": high, "divergence": divergence, "most": most}
    return _weighed(log_ratio, adv, logp, _dppo_holds_back(log_ratio, adv, logp, mask, **options), most)


def _cppo_holds_back(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, bound: float, last: float, budget: float
) -> Tensor:
    kept = mask.bool()
    moved = torch.where(kept, (logp.detach().exp() - old_probability(log_ratio, logp)).abs(), 0.0)
    place = (kept.cumsum(1) - 1) / (kept.sum(1, keepdim=True) - 1).clamp(min=1)
    weight = torch.where(kept, 1 - (1 - last) * place, 0.0).to(moved.dtype)
    spent = weight * moved
    usual = torch.where(kept, moved, math.nan).nanquantile(0.9, dim=1, keepdim=True).clamp(budget, 2 * budget)
    before = usual * (weight.cumsum(1) - weight) - (spent.cumsum(1) - spent)
    return (spent > bound + before.clamp(max=0)) & (adv * log_ratio.detach() > 0)


@needs(*OF_TOKENS)
@holds_back(_cppo_holds_back)
def cppo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    bound: Positive = 0.2,
    last: Fraction = 0.8,
    budget: Positive = 0.02,
) -> Tensor:
    """DPPO with one budget for an answer, which early tokens use up (CPPO, arXiv 2606.10968, Eq. 8-11).

    Let D be |p - q| of a token, and w a weight that falls linearly from 1 at the first token to `last` at the last one.
    A token that would move further out is left out where w D > min(bound, bound + b W - S). W and S are the sums of w
    and of w D over the tokens before it. b is the 0.9 quantile of the answer's D, at least `budget` and at most twice
    `budget`. All other tokens have the loss -A sg(r) logp. The defaults are the published ones.

    Options:
        bound: largest move of one token's probability.
        last: weight of a move at the last token; at the first token it is 1.
        budget: move of a token that uses nothing of the budget up.

    Raises:
        ValueError: If `bound` or `budget` is not positive, or `last` is not in (0, 1].
    """
    if not (bound > 0 and budget > 0 and 0 < last <= 1):
        raise ValueError(
            f"CPPO has bound={bound}, last={last}, budget={budget}; use bound, budget > 0 and 0 < last <= 1"
        )
    adv = per_column(adv)
    left_out = _cppo_holds_back(log_ratio, adv, logp, mask, bound=bound, last=last, budget=budget)
    return _weighed(log_ratio, adv, logp, left_out, math.inf)


TRUST_REGIONS: dict[str, Callable[..., Tensor]] = {"spo": spo, "dppo": dppo, "cppo": cppo}
