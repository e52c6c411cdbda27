"""Tokens drawn from logits, and the log-probs of tokens: what causal and masked language models share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .advantages import precise

NUMBERS = 1 << 22


def pick(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The token [B] that a uniform number [B] in [0, 1) picks in each row of logits [B, V], and its log-prob [B]."""
    logits = logits.float()
    # Only sums need float64: over a large vocabulary, a sum in float32 would shift the borders between tokens.
    largest = logits.amax(-1, keepdim=True)
    mass = (logits - largest).exp_().cumsum(-1, dtype=precise(logits.device))
    threshold = (uniform.to(mass) * mass[:, -1])[:, None]
    # `right` takes the first token whose cumulative mass exceeds the number, so it never takes a token without mass.
    token = torch.searchsorted(mass, threshold, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
    chosen = (logits.gather(1, token[:, None]) - largest).squeeze(1)
    return token, chosen.to(mass) - mass[:, -1].log()


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by a temperature above 0; the same tensor at temperature 1, because a copy would be as large."""
    return logits if temperature == 1 else logits / temperature


def token_log_probs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs [B, T] of tokens `ids` [B, T], in float32 whatever the logits are.

    The logits may go on after the last token. In float32 there are never more than `NUMBERS` numbers, or one row, at a
    time. The backward pass makes the gradient of the logits and nothing else of their size.

    Args:
        logits: [B, K, V], K at least T; the logits of token t are at t.
        ids: [B, T].
        temperature: logits are divided by it.
    """
    found: Tensor = _TokenLogProbs.apply(logits, ids, temperature)
    return found


@torch.no_grad()
def own_curvature(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """[B, T] curvature of a token's log-likelihood along its own gradient, in float32 and without a gradient.

    The gradient of log p(y) in the logits is u = e_y - p, and minus its second derivative is the Fisher matrix F =
    diag(p) - p p^T. The result is u^T F u, which is the variance of u under p: from 0 to 27/64.

    Args:
        logits: [B, K, V], K at least T; the logits of token t are at t.
        ids: [B, T].
        temperature: logits are divided by it; the gradient is in the divided logits.
    """
    found = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    for place in places(logits, ids):
        p = tempered(logits[place].float(), temperature).softmax(-1)
        u = -p
        u.scatter_add_(-1, ids[place][..., None], torch.ones_like(u[..., :1]))
        mean = (p * u).sum(-1, keepdim=True)
        found[place] = (p * (u - mean).square()).sum(-1)
    return found


def relative_logits(logits: Tensor, ids: Tensor, others: Tensor, temperature: float = 1.0) -> Tensor:
    """[B, T, K] log-probs of tokens `others` less the log-prob of the token in `ids`, float32, with a gradient.

    The sum with `token_log_probs` is the log-probs of the tokens `others`. Only the chosen logits are copied.

    Args:
        logits: [B, N, V], N at least T; the logits of token t are at t.
        ids: [B, T].
        others: [B, T, K] ids of tokens.
        temperature: logits are divided by it.
    """
    # The gradient of every gather is as large as the logits, so there is one.
    both = logits.gather(-1, torch.cat([others, ids[..., None]], -1)).float()
    return tempered(both[..., :-1] - both[..., -1:], temperature)


class _TokenLogProbs(torch.autograd.Function):
    """`x[id] - logsumexp(x)`, with the gradient `onehot - softmax(x)`, of a few positions at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        chosen = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        total = torch.empty_like(chosen)
        for place in places(logits, ids):
            scaled = tempered(logits[place].float(), temperature)
            chosen[place] = scaled.gather(-1, ids[place][..., None]).squeeze(-1)
            total[place] = scaled.logsumexp(-1)
        ctx.save_for_backward(logits, ids, total)
        ctx.temperature = temperature
        return chosen - total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, total = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        gradient[:, ids.shape[1] :] = 0
        for place in places(logits, ids):
            scaled, weight = tempered(logits[place].float(), ctx.temperature), given[place][..., None]
            slope = (scaled - total[place][..., None]).exp_().mul_(-weight)
            slope.scatter_add_(-1, ids[place][..., None], weight)
            gradient[place] = tempered(slope, ctx.temperature)
        return gradient, None, None


def places(logits: Tensor, ids: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and positions of at most `NUMBERS` logits, or of one position: several whole rows, or a part of one row."""
    positions = max(NUMBERS // logits.shape[-1], 1)
    rows = max(positions // max(ids.shape[1], 1), 1)
    for first in range(0, ids.shape[0], rows):
        for k in range(0, ids.shape[1], positions):
            yield slice(first, first + rows), slice(k, min(k + positions, ids.shape[1]))
