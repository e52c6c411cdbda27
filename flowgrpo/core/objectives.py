"""The policy loss: ratio level, surrogate, weight, penalty and reduction, composed once for every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .surrogates import (
    LOG_LIMIT,
    SURROGATES,
    cispo,
    clip,
    dro,
    gmpo,
    held_back,
    losses,
    pooled_per_column,
    reinforce,
    sapo,
    vespo,
)

__all__ = [
    "SURROGATES",
    "cispo",
    "clip",
    "dro",
    "gaussian_kl",
    "gmpo",
    "held_columns",
    "kl",
    "policy_loss",
    "reinforce",
    "sapo",
    "vespo",
]

KL_KINDS = ("k1", "k2", "k3", "k3+")
LEVELS = ("token", "sequence")
REDUCTIONS = ("token", "sequence", "sum")


def _widen(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def kl(logp: Tensor, ref_logp: Tensor, kind: str = "k1") -> Tensor:
    """Per-column estimate of KL(policy || reference) at samples of the policy (Schulman, "Approximating KL").

    With d = logp - ref_logp: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d. As a *loss term* use "k2" or "k3+" (the value of
    k3 with the gradient of k2), or multiply k3 by the ratio. The reason is the expected gradient on-policy (arXiv
    2510.01555): k1 has the gradient 0, k3 has the gradient of KL(reference || policy), and only k2 has the exact
    gradient.

    Args:
        logp: [B, T], with gradient.
        ref_logp: [B, T].
        kind: "k1", "k2", "k3" or "k3+".

    Returns:
        [B, T], float32 at least.

    Raises:
        ValueError: For an unknown `kind`.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"`kind` is {kind!r}; use one of {', '.join(KL_KINDS)}")
    gap = _widen(logp) - _widen(ref_logp).detach()
    if kind == "k1":
        return gap
    quadratic = 0.5 * gap.square()
    if kind == "k2":
        return quadratic
    value = torch.expm1(-gap) + gap
    return value if kind == "k3" else quadratic - quadratic.detach() + value.detach()


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor | float) -> Tensor:
    """Exact KL of two Gaussian transitions of equal `std`, per latent element: mean((dmu)^2) / (2 std^2).

    The KL of the whole transition is D times the result, where D is the number of elements. Flow-GRPO (arXiv
    2505.05470) takes the mean of log-probs over elements, so the KL is a mean here too. `std` includes sqrt(delta
    sigma). Flow-GRPO's own code leaves sqrt(delta sigma) out, so its KL is delta times this KL, and a beta of Flow-GRPO
    becomes beta * delta here.

    Args:
        mean: [B, T, ...], with gradient.
        ref_mean: [B, T, ...], shaped like `mean`.
        std: Per-element standard deviation of the transition: a number, [T], or [B, T]. Where `std` is 0 (an ODE step,
            which has no density), the result is NaN without a gradient: mask these columns.

    Returns:
        [B, T], float32 at least, in nats per element.

    Raises:
        ValueError: If shapes do not match.
    """
    if mean.dim() < 2 or mean.shape != ref_mean.shape:
        raise ValueError(
            f"`mean` has shape {tuple(mean.shape)} and `ref_mean` {tuple(ref_mean.shape)}; "
            "give both as (B, T, ...), alike"
        )
    square = (_widen(mean) - _widen(ref_mean).detach()).square()
    square = square.flatten(2).mean(-1) if square.dim() > 2 else square
    width = torch.as_tensor(std, dtype=square.dtype, device=square.device).detach()
    if not broadcasts(width, square):
        raise ValueError(
            f"`std` has shape {tuple(width.shape)}; give a number, (T,) or (B, T) for a mean of shape "
            f"{tuple(mean.shape)}"
        )
    # The division must not see a zero, not even in a branch that is dropped: the gradient would be 0 * inf.
    stochastic = width > 0
    return torch.where(stochastic, square / (2 * width.where(stochastic, 1.0).square()), torch.nan)


def broadcasts(values: Tensor, like: Tensor) -> bool:
    """Whether `values` expands to the shape of `like`."""
    sizes = zip(values.shape[::-1], like.shape[::-1])
    return values.dim() <= like.dim() and all(size in (1, want) for size, want in sizes)


def _columns(values: Tensor, like: Tensor, name: str) -> Tensor:
    """Broadcast [B], [B, 1], [1, T] or [B, T] to the shape of `like`, in its dtype."""
    wide = values[:, None] if values.dim() == 1 and len(values) == len(like) else values
    if wide.dim() != 2 or not broadcasts(wide, like):
        raise ValueError(
            f"`{name}` has shape {tuple(values.shape)}; give ({like.shape[0]},) or {tuple(like.shape)}, "
            "one value per row or per column"
        )
    return wide.to(like.device, torch.bool if values.dtype == torch.bool else like.dtype).expand_as(like)


@dataclass(frozen=True)
class _Inputs:
    logp: Tensor  # [B, T] with gradient; 0 where it must have no influence
    log_ratio: Tensor  # [B, T] with gradient
    adv: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    weight: Tensor | None  # [B, T] detached, 0 outside the mask


def _prepare(
    logp: Tensor, old_logp: Tensor | None, advantages: Tensor, mask: Tensor | None, weight: Tensor | None
) -> _Inputs:
    """Check shapes, and replace masked-out values *before* any arithmetic, because 0 * NaN is NaN in a gradient."""
    if logp.dim() != 2:
        raise ValueError(f"`logp` has shape {tuple(logp.shape)}; give (B, T), rows by denoising steps or tokens")
    logp = _widen(logp)
    if mask is None:
        kept = torch.ones_like(logp, dtype=torch.bool)
    else:
        kept = _columns(mask, logp, "mask").bool()
    adv = torch.where(kept, _columns(advantages.detach(), logp, "advantages"), 0.0)
    logp = torch.where(kept, logp, 0.0)
    if old_logp is None:
        log_ratio = logp - logp.detach()
    elif old_logp.shape != logp.shape:
        raise ValueError(f"`old_logp` has shape {tuple(old_logp.shape)} but `logp` {tuple(logp.shape)}")
    else:
        log_ratio = logp - torch.where(kept, old_logp.detach().to(logp.dtype), 0.0)
    if weight is None:
        return _Inputs(logp, log_ratio, adv, kept, None)
    weight = torch.where(kept, _columns(weight.detach(), logp, "weight").to(logp.dtype), 0.0)
    # A column of weight 0 may even hold -inf. It gets a finite value, because pooled ratios still read it.
    used = weight != 0
    finite = log_ratio.detach().nan_to_num(0.0, 0.0, 0.0).clamp(-LOG_LIMIT, LOG_LIMIT)
    return _Inputs(torch.where(used, logp, 0.0), torch.where(used, log_ratio, finite), adv, kept, weight)


def _reduce(loss: Tensor, mask: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """Sum of a masked loss [B, T], and the count to divide by for the mean: tokens, non-empty rows, or rows."""
    if reduce == "token":
        return loss.sum(), mask.sum()
    if reduce == "sum":
        return loss.sum(), torch.full_like(mask.sum(), len(mask))
    tokens = mask.sum(1)
    return (loss.sum(1) / tokens.clamp(min=1)).sum(), (tokens > 0).sum()


def _gradient_scale(surrogate: Callable[..., Tensor], log_ratio: Tensor, inputs: _Inputs) -> Tensor:
    """|d loss / d logp| per column before weight and penalty: the part of A * ratio that the surrogate leaves.

    The surrogate is differentiated. This works for plug-in surrogates too, and always agrees with the loss that is
    trained.
    """
    with torch.enable_grad():
        leaf = torch.zeros_like(inputs.logp, requires_grad=True)
        loss = surrogate(log_ratio.detach() + leaf, inputs.adv, inputs.logp.detach() + leaf, inputs.mask)
        if not loss.requires_grad:
            return torch.zeros_like(loss)
        return torch.autograd.grad(loss.sum(), leaf)[0].abs()


def _held(surrogate: Callable[..., Tensor], log_ratio: Tensor, inputs: _Inputs, scale: Tensor | None = None) -> Tensor:
    """[B, T] bool: columns that the surrogate holds back; if the surrogate has no rule, columns without a gradient."""
    found = held_back(surrogate, log_ratio, inputs.adv, inputs.logp, inputs.mask)
    if found is None:
        slope = _gradient_scale(surrogate, log_ratio, inputs) if scale is None else scale
        found = (slope == 0) & (inputs.adv != 0)
    return found & inputs.mask


def held_columns(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    surrogate: Callable[..., Tensor] = clip,
    level: str = "token",
) -> Tensor:
    """[B, T] bool: columns that have no gradient in `policy_loss` with these arguments because of a bound.

    The metric "clip_share" counts these columns. A surrogate says itself what it holds back (`surrogates.holds_back`).
    For a surrogate without such a rule, a column counts if its gradient is 0 and its advantage is not 0.
    """
    inputs = _prepare(logp.detach(), old_logp, advantages, mask, None)
    return _held(surrogate, _at_level(inputs, level), inputs)


def _at_level(inputs: _Inputs, level: str) -> Tensor:
    return pooled_per_column(inputs.log_ratio, inputs.mask) if level == "sequence" else inputs.log_ratio


def _metrics(scale: Tensor, cut: Tensor, log_ratio: Tensor, inputs: _Inputs) -> dict[str, Tensor]:
    mask, raw = inputs.mask, inputs.log_ratio.detach()
    positive, negative = inputs.adv > 0, inputs.adv < 0

    def pair(values: Tensor, where: Tensor) -> Tensor:
        chosen = mask & where
        return torch.stack([torch.where(chosen, values.to(raw.dtype), 0.0).sum(), chosen.sum().to(raw.dtype)])

    everywhere = torch.ones_like(mask)
    metrics = {
        "ratio": pair(log_ratio.detach().exp(), everywhere),
        "log_ratio": pair(raw, everywhere),
        "log_ratio_sq": pair(raw.square(), everywhere),
        "approx_kl": pair(raw.expm1() - raw, everywhere),
        "clip_share": pair(cut, everywhere),
        "clip_share_pos": pair(cut, positive),
        "clip_share_neg": pair(cut, negative),
        "gradient_scale": pair(scale / inputs.adv.abs(), positive | negative),
    }
    if inputs.weight is not None:
        metrics["weight"] = pair(inputs.weight, everywhere)
    return metrics


def policy_loss(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    surrogate: Callable[..., Tensor] = clip,
    level: str = "token",
    weight: Tensor | None = None,
    penalty: Tensor | None = None,
    reduce: str = "token",
    denom: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy-gradient loss of every GRPO-family method: surrogate, weight, penalty, reduction.

    This function also covers GRPO-Guard (arXiv 2510.22319, Eq. 8): give its log-ratio mean(eps * dmu) as `logp`, zeros
    as `old_logp`, and 1 / delta sigma as `weight`.

    Args:
        logp: [B, T] log-probs under the policy being trained, with gradient.
        old_logp: [B, T] log-probs under the policy that sampled; None if the run is strictly on-policy (ratio 1).
        advantages: [B] or [B, T].
        mask: [B, T] bool or 0/1, None for all. Masked-out values may be NaN: they reach neither the value nor the
            gradient.
        surrogate: A function of `flowgrpo.core.surrogates`, with its hyper-parameters bound by `functools.partial`.
        level: "token" for a ratio per column; "sequence" for the row's geometric-mean ratio (GSPO, arXiv 2507.18071,
            Eq. 7). If `reduce` is "sequence" too, the loss has the value and the gradient of the pooled form.
        weight: [B] or [B, T], detached here; multiplies the surrogate, but not the penalty. Where `weight` is 0,
            log-probs may be infinite.
        penalty: [B] or [B, T], already multiplied by its coefficient, with its own gradient; added after the weight.
        reduce: "token" is sum / tokens; "sequence" is sum of row means / rows with a token; "sum" is sum / rows.
        denom: Count of the whole optimizer step (tokens or rows over all micro-batches and ranks). With it, losses and
            gradients of micro-batches add up. None takes the count of this batch.

    Returns:
        (scalar loss, metrics). Each metric is a detached tensor [sum, count]: add it over micro-batches and ranks, and
        divide when logging. The metrics are "loss" (mean per token or row, whatever `denom` is), "ratio" (as the
        surrogate sees it), "log_ratio", "log_ratio_sq", "approx_kl" (k3 of KL(old || new)), "clip_share" (entries that
        the surrogate holds back, see `held_columns`), "clip_share_pos" and "clip_share_neg" (the share for one sign of
        the advantage), "gradient_scale" (|d loss / d logp| / |A|, which is the ratio where no bound holds), and
        "weight" and "penalty" if given.

    Raises:
        ValueError: For an unknown choice, shapes that do not match, or a `denom` that is not positive.
    """
    if level not in LEVELS:
        raise ValueError(f"`level` is {level!r}; use one of {', '.join(LEVELS)}")
    if reduce not in REDUCTIONS:
        raise ValueError(f"`reduce` is {reduce!r}; use one of {', '.join(REDUCTIONS)}")
    if denom is not None and not isinstance(denom, Tensor) and not denom > 0:
        raise ValueError(f"`denom` is {denom}; use the positive count of tokens or rows of the whole optimizer step")
    inputs = _prepare(logp, old_logp, advantages, mask, weight)
    log_ratio = _at_level(inputs, level)
    loss = losses(surrogate, log_ratio, inputs.adv, inputs.logp, inputs.mask)
    scale = _gradient_scale(surrogate, log_ratio, inputs)
    metrics = _metrics(scale, _held(surrogate, log_ratio, inputs, scale), log_ratio, inputs)
    if inputs.weight is not None:
        loss = loss * inputs.weight
    if penalty is not None:
        extra = torch.where(inputs.mask, _columns(penalty, inputs.logp, "penalty"), 0.0)
        metrics["penalty"] = torch.stack([extra.detach().sum(), inputs.mask.sum().to(extra.dtype)])
        loss = loss + extra
    total, count = _reduce(torch.where(inputs.mask, loss, 0.0), inputs.mask, reduce)
    metrics["loss"] = torch.stack([total.detach(), count.to(total.dtype)])
    return total / (count.clamp(min=1) if denom is None else denom), metrics
