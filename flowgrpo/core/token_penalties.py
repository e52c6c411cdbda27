"""Penalties of tokens. A penalty times its weight is added to the loss of the tokens.

A run passes the parameters before the `*` by name: `logp` [R, T] with gradient, `ref_logp` of the reference, `old_logp`
of the policy that sampled, `mask`, and `adv` [R] or [R, T]. A run of a causal model also passes `entropy` [R, T], in
nats and without gradient. All penalties return [R, T].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..parts.needs import needs, several_updates
from ..parts.ranges import Count, NotNegative, Share
from .entropy_guided import uncertain_windows
from .guards import likelihood_guard
from .objectives import kl as kl_estimate
from .surrogates import LOG_LIMIT


def kl(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, kind: Literal["k2", "k3+", "k3r"] = "k2") -> Tensor:
    """KL divergence to the reference, by an estimate with the correct gradient (2510.01555).

    Args:
        logp: [R, T] with gradient.
        ref_logp: [R, T].
        old_logp: [R, T].
        kind: `k2` is half of the squared log-ratio; `k3+` has the value of k3 and the gradient of k2. Both are exact
            on average before the policy moves. `k3r` is k3 times the ratio, and stays exact after it (DeepSeek-V3.2,
            2512.02556).
    """
    if kind != "k3r":
        return kl_estimate(logp, ref_logp, kind)
    return (logp - old_logp.detach()).clamp(max=LOG_LIMIT).exp() * kl_estimate(logp, ref_logp, "k3")


@needs(several_updates("compares with the policy that sampled, and has no effect before the policy has moved"))
def llds(logp: Tensor, old_logp: Tensor, mask: Tensor, adv: Tensor, *, rows: Literal["all", "good"] = "all") -> Tensor:
    """The log-prob that tokens have lost, in answers that became less likely (LLDS, 2512.04220).

    Args:
        logp: [R, T] with gradient.
        old_logp: [R, T].
        mask: [R, T].
        adv: [R] or [R, T].
        rows: answers that are penalised: `all`, or `good` for answers whose advantage is above 0.
    """
    return likelihood_guard(logp, old_logp, mask, adv if rows == "good" else None)


def window_kl(
    logp: Tensor,
    ref_logp: Tensor,
    entropy: Tensor,
    mask: Tensor,
    *,
    kind: Literal["k2", "k3+"] = "k2",
    window: Count = 4,
    threshold: NotNegative = 1.0,
    relaxed: Share = 0.1,
) -> Tensor:
    """KL divergence to the reference, relaxed where the policy stays uncertain for several tokens (ARES, 2510.08457).

    These are the tokens that trigger exploration, see `uncertain_windows`.

    Args:
        logp: [R, T] with gradient.
        ref_logp: [R, T].
        entropy: [R, T] in nats.
        mask: [R, T].
        kind: as for penalty `kl`.
        window: tokens of a window; at the end of a completion there are fewer.
        threshold: mean entropy in nats above which a token triggers exploration.
        relaxed: share of the penalty that is left at such a token.
    """
    trigger = uncertain_windows(entropy, mask, window, threshold)
    return torch.where(trigger, relaxed, 1.0) * kl_estimate(logp, ref_logp, kind)


@needs(several_updates("holds the policy near the one that began the iteration, and has no effect before it has moved"))
def kl_convex(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor, *, base: Share = 0.5, kind: Literal["k2", "k3+"] = "k2"
) -> Tensor:
    """base KL(policy || reference) + (1 - base) KL(policy || policy before the iteration) (ReMix, 2507.06892).

    Args:
        logp: [R, T] with gradient.
        ref_logp: [R, T].
        old_logp: [R, T].
        base: share of the divergence from the reference.
        kind: `k2` is half of the squared log-ratio; `k3+` has the value of k3 and the gradient of k2.
    """
    return base * kl_estimate(logp, ref_logp, kind) + (1 - base) * kl_estimate(logp, old_logp, kind)


@needs(several_updates("compares with the policy that sampled, and has no effect before the policy has moved"))
def kl_old(logp: Tensor, old_logp: Tensor, *, kind: Literal["k2", "k3", "k3+"] = "k3") -> Tensor:
    """KL divergence to the policy before the iteration, as the code of TraceRL has it (2509.06949).

    Args:
        logp: [R, T] with gradient.
        old_logp: [R, T].
        kind: an estimate, see `core.objectives.kl`; the code of TraceRL has `k3`.
    """
    return kl_estimate(logp, old_logp, kind)


TOKEN_PENALTIES: dict[str, Callable[..., Tensor]] = {
    "kl": kl,
    "llds": llds,
    "window_kl": window_kl,
    "kl_convex": kl_convex,
    "kl_old": kl_old,
}
"""`penalty(logp, ..., *, ...) -> [R, T]`."""
