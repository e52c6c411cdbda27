"""Surrogate losses: one function per method, from log-ratio and advantage to a loss per column.

All functions share the signature `(log_ratio [B, T], adv [B] or [B, T], logp [B, T], mask [B, T], *, hyper-parameters)`
and return a loss [B, T] to be minimised. Entries outside `mask` are arbitrary, and `policy_loss` drops them. Bounds are
compared with the *log*-ratio. The reason is precision: a published clip of 2e-6 is only 17 units in the last place of a
float32 ratio near 1, but log space resolves it to seven digits. Bind hyper-parameters with `functools.partial`.

With `holds_back` a surrogate says which entries have no gradient because of a bound. Metrics count these entries.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..parts.choice import named
from ..parts.needs import Need, needs
from ..parts.ranges import Bound, Given, Positive

LOG_LIMIT = 20.0  # exp(20) is far outside any trust region, and far from float32 overflow

Surrogate = TypeVar("Surrogate", bound=Callable[..., Tensor])


def holds_back(rule: Callable[..., Tensor | None] | None = None) -> Callable[[Surrogate], Surrogate]:
    """Let a surrogate say which of its entries have no gradient with respect to the log-ratio because of a bound.

    Args:
        rule: `(log_ratio, adv, logp, mask, **hyper-parameters) -> [B, T]` bool. It gets all hyper-parameters of the
            surrogate, defaults included. Its result counts only where `adv` is not 0. None for a surrogate without a
            bound.
    """

    def marked(surrogate: Surrogate) -> Surrogate:
        surrogate.holds_back = rule or _nothing  # type: ignore[attr-defined]
        return surrogate

    return marked


def held_back(
    surrogate: Callable[..., Tensor], log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor
) -> Tensor | None:
    """[B, T] bool: entries that the surrogate holds back, by its own rule; None if it has no rule.

    Entries of advantage 0 are never held back, because an advantage of 0 is no bound.

    Args:
        surrogate: a function of `flowgrpo.core`, or one marked by `holds_back`, with its hyper-parameters bound.
        log_ratio: [B, T] as it is passed to the surrogate.
        adv: [B] or [B, T].
        logp: [B, T].
        mask: [B, T].
    """
    bound: dict[str, Any] = {}
    while isinstance(surrogate, partial):
        bound, surrogate = {**surrogate.keywords, **bound}, surrogate.func
    rule: Callable[..., Tensor | None] | None = getattr(surrogate, "holds_back", None)
    if rule is None:
        return None
    parameters = inspect.signature(surrogate).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | bound
    wide = per_column(adv)
    held = rule(log_ratio, wide, logp, mask, **options)
    return None if held is None else held & (wide != 0)


def losses(surrogate: Callable[..., Tensor], log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """[B, T] losses of a surrogate.

    Args:
        surrogate: a function of `flowgrpo.core` or your own, with its hyper-parameters bound.
        log_ratio: [B, T].
        adv: [B] or [B, T].
        logp: [B, T].
        mask: [B, T].

    Raises:
        ValueError: if the surrogate does not give one loss for each entry, or its losses have no gradient.
    """
    found = surrogate(log_ratio, adv, logp, mask)
    who = named("surrogate", surrogate)
    if not isinstance(found, Tensor) or found.shape != log_ratio.shape:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"{who} has to give a loss for each entry, a tensor of shape {tuple(log_ratio.shape)} like "
            f"`log_ratio`; it gave {what}"
        )
    if log_ratio.requires_grad:
        require_gradient(who, found, "`log_ratio` or `logp`")
    return found


def require_gradient(who: str, loss: Tensor, source: str) -> None:
    """Refuse a loss that no weight can change.

    Args:
        who: what gave the loss, for messages.
        loss: of any shape. An empty loss is not refused, and nothing is where no gradients are recorded.
        source: that from which the loss has to follow, for messages.

    Raises:
        ValueError: the loss has no gradient.
    """
    if torch.is_grad_enabled() and loss.numel() and not loss.requires_grad:
        raise ValueError(
            f"{who} gives a loss without a gradient, from which nothing can be learned; compute the loss from "
            f"{source}, and do not detach it"
        )


def _nothing(log_ratio: Tensor, *_: Tensor, **__: object) -> Tensor:
    return torch.zeros_like(log_ratio, dtype=torch.bool)


def beyond_limit(log_ratio: Tensor, *_: Tensor, **__: object) -> Tensor:
    """A rule of `holds_back`: the log-ratio is beyond the limit up to which the ratio is computed."""
    return log_ratio > LOG_LIMIT


def per_column(adv: Tensor) -> Tensor:
    """Advantages [B] or [B, T], in a shape that broadcasts to [B, T]."""
    return adv[:, None] if adv.dim() == 1 else adv


def log_bounds(low: float, high: float) -> tuple[float, float]:
    """Bounds of the log-ratio for a ratio in [1 - low, 1 + high]; `low >= 1` means no lower bound.

    Raises:
        ValueError: If `low` or `high` is negative.
    """
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip bounds are low={low}, high={high}; use non-negative distances from a ratio of 1")
    return (math.log1p(-low) if low < 1 else -math.inf), math.log1p(high)


def beyond(log_ratio: Tensor, adv: Tensor, lower: Tensor | float, upper: Tensor | float) -> Tensor:
    """Where `pessimistic` returns a bound: log-ratios above `upper` if A > 0, below `lower` if A < 0."""
    return ((adv > 0) & (log_ratio > upper)) | ((adv < 0) & (log_ratio < lower))


def pessimistic(log_ratio: Tensor, adv: Tensor, lower: Any, upper: Any) -> Tensor:
    """Bound the log-ratio on the side where `min(A r, A clip(r))` does: above if A > 0, below if A < 0.

    The code uses `where` because `minimum` halves the gradient at a tie.
    """
    held = beyond(log_ratio, adv, lower, upper)
    return torch.where(held & (adv > 0), upper, torch.where(held, lower, log_ratio))


def _clip_holds_back(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, low: float, high: float, dual: float | None
) -> Tensor:
    held = beyond(log_ratio, adv, *log_bounds(low, high))
    return held if dual is None else held | ((adv < 0) & (log_ratio > math.log(dual)))


@holds_back(_clip_holds_back)
def clip(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    low: Bound = 0.2,
    high: Bound = 0.2,
    dual: Positive | None = None,
) -> Tensor:
    """PPO's clipped surrogate, `-min(A r, A clip(r, 1-low, 1+high))` (arXiv 1707.06347, Eq. 7).

    `high > low` is DAPO's clip-higher (2503.14476). `low = high = inf` is the plain ratio. `dual` = c > 1 also bounds
    the ratio at c where A < 0. This is dual-clip PPO (1912.09729), the two-sided clip of INTELLECT-2 (2505.07291), and
    `delta` in TRL. `logp` is not used.

    Options:
        low: the ratio counts down to 1 - low; with 1 or more there is no lower bound.
        high: the ratio counts up to 1 + high.
        dual: largest ratio that counts where the advantage is below 0; there is no such bound by default.

    Raises:
        ValueError: If a bound is negative or `dual` is not above 1.
    """
    adv = per_column(adv)
    bounded = pessimistic(log_ratio, adv, *log_bounds(low, high))
    if dual is not None:
        if not dual > 1:
            raise ValueError(f"`dual` is {dual}; use a ratio above 1, such as 3.0, or None for no second bound")
        ceiling = math.log(dual)
        bounded = torch.where((adv < 0) & (bounded > ceiling), ceiling, bounded)
    return -adv * bounded.exp()


def _clip_nats_holds_back(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, nats: float, elements: int
) -> Tensor:
    return beyond(log_ratio, adv, *log_bounds(nats / elements, nats / elements))


@holds_back(_clip_nats_holds_back)
def clip_nats(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, nats: Positive, elements: Given[int]
) -> Tensor:
    """`clip` with a bound for the whole latent: low = high = nats / D. One value of `nats` suits latents of every size.

    Args:
        log_ratio: [B, T], the mean over the elements of a latent.
        adv: [B] or [B, T].
        logp: [B, T], not used.
        mask: [B, T].
        nats: bound of the log-ratio of a whole latent.
        elements: D, the number of elements of a latent.
    """
    return clip(log_ratio, adv, logp, mask, low=nats / elements, high=nats / elements)


@holds_back()
def cispo(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, low: Bound = 1.0, high: Bound = 5.0) -> Tensor:
    """Clipped importance-sampling weight, `-sg(clamp(r, 1-low, high)) A logp`.

    CISPO, from MiniMax-M1 (arXiv 2506.13585). `high` bounds the ratio itself, as in TRL and ScaleRL. verl uses [1-low,
    1+high]: pass 1 plus verl's value as `high`. The weight is truncated, but every entry keeps its gradient.

    Options:
        low: the weight is at least 1 - low; with 1 or more there is no lower bound.
        high: largest weight, given as a ratio.

    Raises:
        ValueError: If `low` is negative or `high` is not positive.
    """
    if not (low >= 0 and high > 0):
        raise ValueError(f"CISPO bounds are low={low}, high={high}; use low >= 0 and high > 0 (a bound of the ratio)")
    lower, _ = log_bounds(low, 0.0)
    return -log_ratio.detach().clamp(lower, math.log(high)).exp() * per_column(adv) * logp


@holds_back(beyond_limit)
def sapo(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05
) -> Tensor:
    """Soft adaptive gate, `-A sigmoid(tau (r - 1)) 4 / tau` (SAPO, arXiv 2511.20347).

    `tau` is `tau_pos` where A > 0, else `tau_neg`. At r = 1 the gradient is that of REINFORCE. `logp` is not used.

    Options:
        tau_pos: temperature of the gate where the advantage is above 0.
        tau_neg: temperature of the gate elsewhere.

    Raises:
        ValueError: If a temperature is not positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"SAPO temperatures are tau_pos={tau_pos}, tau_neg={tau_neg}; use positive numbers")
    adv = per_column(adv)
    positive = adv > 0
    excess = log_ratio.clamp(max=LOG_LIMIT).expm1()
    gate = torch.where(
        positive,
        torch.sigmoid(tau_pos * excess) * (4 / tau_pos),
        torch.sigmoid(tau_neg * excess) * (4 / tau_neg),
    )
    return -adv * gate


def _gmpo_holds_back(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    return beyond(log_ratio, adv, -low, high)


@needs(Need("objective.level", ("token", None), "pools the row after its clip"))
@holds_back(_gmpo_holds_back)
def gmpo(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, low: Bound = 0.4, high: Bound = 0.4) -> Tensor:
    """Geometric-mean ratio, `-A exp(mean over the row of the clipped log r)` (GMPO, arXiv 2507.20673).

    `low` and `high` bound the log-ratio itself (the defaults bound the ratio to [e^-0.4, e^0.4]). The sign of A decides
    which bound applies, as in PPO. Every column of a row has the row's pooled value and its own share of the gradient.
    So `reduce="sequence"` gives the value and the gradient of the pooled form, and the graph stays per column. Use
    `level="token"`, because this function pools after the clip. If advantages differ between the columns of a row, each
    weights its own column's share. `logp` is not used.

    Options:
        low: least log-ratio that counts, without its minus sign.
        high: greatest log-ratio that counts.

    Raises:
        ValueError: If a bound is negative.
    """
    if not (low >= 0 and high >= 0):
        raise ValueError(f"GMPO bounds are low={low}, high={high}; use non-negative bounds of the log-ratio")
    adv = per_column(adv)
    bounded = pessimistic(log_ratio, adv, -low, high)
    return -adv * pooled_per_column(bounded, mask).exp()


@holds_back()
def vespo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    k_pos: float = 2.0,
    lam_pos: float = 3.0,
    k_neg: float = 3.0,
    lam_neg: float = 2.0,
) -> Tensor:
    """Soft sequence-level weight: `-sg(phi(w)) A logp` with `phi(w) = w^k e^(lam (1 - w))`.

    VESPO (arXiv 2602.10693). `w` is the ratio of the whole row, the exp of the *sum* of log r over `mask`. phi(1) is 1.
    (k, lam) is (`k_pos`, `lam_pos`) where A >= 0, else (`k_neg`, `lam_neg`). The log-ratio is bounded to +-20 per
    column and [log 1e-8, 20] per row, as in the authors' code.

    Options:
        k_pos: power of the row's ratio where the advantage is not below 0.
        lam_pos: rate at which a large ratio is damped where the advantage is not below 0.
        k_neg: power of the row's ratio where the advantage is below 0.
        lam_neg: rate at which a large ratio is damped where the advantage is below 0.
    """
    adv = per_column(adv)
    bounded = log_ratio.detach().clamp(-LOG_LIMIT, LOG_LIMIT)
    log_w = torch.where(mask.bool(), bounded, 0.0).sum(1, keepdim=True).clamp(math.log(1e-8), LOG_LIMIT)
    excess = log_w.expm1()
    phi = torch.where(adv >= 0, k_pos * log_w - lam_pos * excess, k_neg * log_w - lam_neg * excess).exp()
    return -phi * adv * logp


@holds_back()
def dro(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, beta: float = 0.05) -> Tensor:
    """Direct reward optimisation, `-A logp + beta/2 (log r)^2` (DRO, arXiv 2405.19107).

    This is the policy part of the paper's loss, with A in place of reward minus learned value. It has a quadratic pull
    towards the behaviour policy instead of a clip, and is valid off-policy.

    Options:
        beta: strength of the pull towards the policy that sampled.
    """
    return -per_column(adv) * logp + 0.5 * beta * log_ratio.square()


@holds_back()
def reinforce(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """Policy gradient without a ratio, `-A logp` (Williams 1992; GPG, arXiv 2504.02546)."""
    return -per_column(adv) * logp


def pooled_per_column(values: Tensor, mask: Tensor) -> Tensor:
    """`x - sg(x) + sg(row mean of x over mask)`, [B, T].

    Take a function of the result and average it over a row's masked columns. The average has the value and the gradient
    of the same function of the row mean (GSPO-token, arXiv 2507.18071, Eq. 14), but the graph of each column holds only
    that column.
    """
    kept = mask.bool()
    fixed = torch.where(kept, values.detach(), 0.0)
    mean = fixed.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
    return values - values.detach() + mean


SURROGATES: dict[str, Callable[..., Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
    "dro": dro,
    "reinforce": reinforce,
}
