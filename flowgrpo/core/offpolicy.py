"""Surrogates for samples of an older policy: a pull towards that policy, a regression, a negative policy.

The signature is the one in `surrogates`. Group-relative REINFORCE needs no on-policy samples: with a regulariser it
minimises a pairwise consistency loss for *any* distribution of the data (arXiv 2509.24203). The methods of that paper
here are `opmd`, `asymre` and `rec`. The paper's RED-Weight is `weight=(advantages / tau).exp()` of `policy_loss`, for
any surrogate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..parts.ranges import Bound, NotNegative, Positive
from .bounds import bapo, dcpo
from .pooled_ratios import dhpo
from .surrogates import LOG_LIMIT, beyond, beyond_limit, holds_back, log_bounds, per_column


def _excess(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=LOG_LIMIT).expm1()


def ratio_variance(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """tensor([sum of (r - 1)^2, number of columns]) over `mask`, the measurement for the dual update of `r2vpo`.

    The result adds over micro-batches and ranks, and is detached. Under the policy that sampled, the mean of the ratio
    is 1, so its second moment about 1 is its variance. Outside `mask`, `log_ratio` [B, T] may be NaN.
    """
    kept = mask.bool()
    square = _excess(torch.where(kept, log_ratio.detach(), 0.0)).square()
    return torch.stack([square.sum(), kept.sum().to(square.dtype)])


@holds_back(beyond_limit)
def r2vpo(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, lam: NotNegative = 1.0) -> Tensor:
    """Plain ratio with a price on its variance, `-A r + lam (r - 1)^2` (R2VPO, arXiv 2601.03320).

    This is the Lagrangian of the constraint that the variance of the ratio is at most a target. `lam` is a constant, or
    the value of a `controllers.variance_dual` that is updated with `ratio_variance` after every step. The log-ratio is
    bounded at 20. `logp` is not used.

    Options:
        lam: price of the ratio's variance.

    Raises:
        ValueError: If `lam` is negative.
    """
    if not lam >= 0:
        raise ValueError(f"`lam` is {lam}; use a non-negative price of the ratio's variance")
    excess = _excess(log_ratio)
    return -per_column(adv) * (excess + 1) + lam * excess.square()


@holds_back()
def opmd(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, tau: NotNegative = 0.1) -> Tensor:
    """Online policy mirror descent, `-A logp + tau / 2 (log r of the whole row)^2` (arXiv 2509.24203; Kimi k1.5).

    The pull is quadratic in the row's summed log-ratio; `dro` has such a pull per column. With `reduce="sum"` the sum
    over the row's columns has the value and the gradient of the formula, and the graph stays per column.

    Options:
        tau: strength of the pull of the row's log-ratio towards 0.

    Raises:
        ValueError: If `tau` is negative.
    """
    if not tau >= 0:
        raise ValueError(f"`tau` is {tau}; use a non-negative strength of the pull to the old policy")
    fixed = torch.where(mask.bool(), log_ratio.detach(), 0.0)
    row = fixed.sum(1, keepdim=True)
    return -per_column(adv) * logp + tau * row * (log_ratio - 0.5 * fixed)


@holds_back()
def asymre(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, shift: float = 0.1) -> Tensor:
    """REINFORCE with a lower baseline, `-(A + shift) logp` (AsymRE, arXiv 2506.20520, 2509.24203).

    Off-policy, bad samples are less useful than good ones. The shift is also a pull to imitate the data. The shift acts
    on rows of advantage 0 too: mask the rows that must not be imitated. `log_ratio` is not used.

    Options:
        shift: number that is added to every advantage.
    """
    return -(per_column(adv) + shift) * logp


def _rec_holds_back(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    return beyond(log_ratio, adv, *log_bounds(low, high))


@holds_back(_rec_holds_back)
def rec(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, low: Bound = 0.2, high: Bound = 0.2) -> Tensor:
    """REINFORCE that stops where PPO's clip stops: `-A logp` inside, no gradient outside (REC, arXiv 2509.24203).

    This is the one-sided variant without importance sampling: a column leaves the loss where A > 0 and r > 1 + high, or
    A < 0 and r < 1 - low.

    Options:
        low: the ratio counts down to 1 - low.
        high: the ratio counts up to 1 + high.

    Raises:
        ValueError: If a bound is negative.
    """
    adv = per_column(adv)
    return torch.where(beyond(log_ratio, adv, *log_bounds(low, high)), 0.0, -adv * logp)


@holds_back()
def regression(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, beta: float = 1.0) -> Tensor:
    """Predict the advantage from the log-ratio, `(A - beta log r)^2 / (2 beta)` (Reg-GRPO, arXiv 2506.07464).

    The optimum of the KL-regularised objective has beta log r = A up to a constant of the prompt. The constant vanishes
    for advantages that are centred in their group; `answer_losses.group_regression` removes it exactly. The division by
    2 beta makes the gradient at r = 1 that of REINFORCE. With `level="sequence"` the row's mean log-ratio is the
    predictor. `logp` is not used.

    Options:
        beta: advantage per unit of the log-ratio.

    Raises:
        ValueError: If `beta` is not positive.
    """
    if not beta > 0:
        raise ValueError(f"`beta` is {beta}; use a positive advantage per unit of log-ratio")
    return (per_column(adv) - beta * log_ratio).square() / (2 * beta)


def implicit_negative(log_ratio: Tensor, odds: Tensor, floor: float) -> Tensor:
    """Log-ratio of NFT's negative policy, `log max_v((1 - q r) / (1 - q), floor)`, for odds = q / (1 - q).

    Here q is the share of correct answers. The old policy is the mixture q pi+ + (1 - q) pi-, and with pi+ = r pi_old
    the bad answers come from pi-. max_v bounds the value and leaves the gradient unchanged.
    """
    share = 1 - odds * _excess(log_ratio)
    # The terms are in this order so that the difference is exactly 0, even if the share is far below the floor.
    return (share - share.detach() + share.detach().clamp(min=floor)).log()


def _nft_holds_back(log_ratio: Tensor, adv: Tensor, *_: Tensor, **__: object) -> Tensor:
    return (adv < 0) & (log_ratio > LOG_LIMIT)


@holds_back(_nft_holds_back)
def nft(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, floor: Positive = 1.0) -> Tensor:
    """Likelihood of good answers, and of bad ones under an implicit negative policy (NFT, arXiv 2505.18116).

    With the share q of correct answers to the prompt, a correct answer has the loss -w log r and a wrong one
    -w log max_v((1 - q r) / (1 - q), floor). On-policy, the weight w = sqrt((1 - q) / q) makes the loss equal to GRPO.
    Take 0/1 rewards, and advantages scaled by the group's standard deviation (`eps=0`, `ddof=0`). The advantages are
    then sqrt((1 - q) / q) and -sqrt(q / (1 - q)), so w and q follow from them. The loss becomes -A log r for A > 0 and
    log max_v(1 - A^2 (r - 1), floor) / A for A < 0. In this form the loss takes any advantages. `logp` is not used. For
    the ratio of a whole answer, give log-probs summed to [B, 1].

    Options:
        floor: least probability ratio of the negative policy that counts.

    Raises:
        ValueError: If `floor` is not positive.
    """
    if not floor > 0:
        raise ValueError(f"`floor` is {floor}; use a positive lower bound of the negative policy's ratio")
    adv = per_column(adv)
    wrong = adv < 0
    size = torch.where(wrong, adv, -1.0)  # -1 only keeps the branch that is dropped finite
    return torch.where(wrong, implicit_negative(log_ratio, size.square(), floor) / size, -adv * log_ratio)


MORE_SURROGATES: dict[str, Callable[..., Tensor]] = {
    "asymre": asymre,
    "bapo": bapo,
    "dcpo": dcpo,
    "dhpo": dhpo,
    "nft": nft,
    "opmd": opmd,
    "r2vpo": r2vpo,
    "rec": rec,
    "regression": regression,
}
