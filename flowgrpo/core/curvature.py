"""Tokens whose own update would move the policy too far, by the curvature of the last layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..parts.needs import Need, needs
from ..parts.ranges import Bound, Given, Positive
from .surrogates import clip, held_back, holds_back, per_column


def _rejected(adv: Tensor, curvature: Tensor, limit: float) -> Tensor:
    """[B, T] bool: tokens whose predicted shift of the policy is above the limit."""
    if not limit > 0:
        raise ValueError(f"`limit` is {limit}; use a positive shift of a token's distribution, in nats")
    return 0.5 * per_column(adv).square() * curvature.detach() > limit


def _capo_holds_back(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, curvature: Tensor, limit: float, low: float,
    high: float,
) -> Tensor:  # fmt: skip
    held = held_back(partial(clip, low=low, high=high), log_ratio, adv, logp, mask)
    rejected = _rejected(adv, curvature, limit)
    return rejected if held is None else rejected | held


@needs(
    Need("task", ("text",), "reads the distributions of tokens"),
    Need("objective.level", ("token", None), "rejects tokens", task="text"),
)
@holds_back(_capo_holds_back)
def capo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    curvature: Given[Tensor],
    limit: Positive = 0.1,
    low: Bound = 0.2,
    high: Bound = 0.2,
) -> Tensor:
    """PPO's clip without the tokens whose own update would move their distribution too far (CAPO, arXiv 2510.00819).

    The model of an update is a step of size 1 along the token's own policy gradient in its logits, A (e_y - p). To
    second order it shifts the token's distribution by the KL A^2 c / 2, where c is the curvature of the log-likelihood
    in the direction e_y - p, see `core.categorical.own_curvature`. A token whose shift is above `limit` has no
    gradient, and stays in the count of tokens. The shift is largest, 0.21 A^2, for unlikely tokens next to a likely
    one. It is near 0 for tokens of probability near 1. `logp` is not used.

    Args:
        log_ratio: [B, T].
        adv: [B] or [B, T].
        logp: [B, T].
        mask: [B, T].
        curvature: [B, T], not negative.
        limit: greatest shift of a token's distribution, in nats.
        low: the ratio counts down to 1 - low.
        high: the ratio counts up to 1 + high.

    Raises:
        ValueError: If `limit` is not positive, or a bound is negative.
    """
    return torch.where(_rejected(adv, curvature, limit), 0.0, clip(log_ratio, adv, logp, mask, low=low, high=high))
