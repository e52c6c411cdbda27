"""The divergence of next-token distributions from a teacher's distributions."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Direction = Literal["reverse", "forward", "jsd"]
LEAST = 1e-6
"""Least probability of all the other tokens together."""


def coarse_divergence(
    log_probs: Tensor, target: Tensor, *, direction: Direction = "reverse", beta: float = 0.5
) -> Tensor:
    """Divergence of two distributions over K likely tokens and one bin for all others, over the last dimension.

    It is at most the divergence over all tokens, and equal to it if the K tokens are all tokens. The likelihood of the
    other tokens counts as `LEAST` at the least.

    Args:
        log_probs: [..., K] log-probs of the student, with gradient.
        target: [..., K] log-probs of the same tokens under the teacher; -inf for a token without probability.
        direction: "reverse" is the KL of the student from the teacher, "forward" the KL of the teacher from the
            student. "jsd" is the generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649, Eq. 1): with the mixture
            M = beta teacher + (1 - beta) student, beta KL(teacher || M) + (1 - beta) KL(student || M). It is bounded.
        beta: for "jsd", in (0, 1): the share of the teacher in the mixture. Divided by beta, it tends to the forward KL
            as beta tends to 0; divided by 1 - beta, it tends to the reverse KL as beta tends to 1.

    Returns:
        [...], not negative.

    Raises:
        ValueError: If shapes do not match, or `beta` is not between 0 and 1.
    """
    if log_probs.shape != target.shape:
        raise ValueError(f"`log_probs` has shape {tuple(log_probs.shape)} and `target` {tuple(target.shape)}")
    if not 0 < beta < 1:
        raise ValueError(f"`beta` is {beta}; give a number between 0 and 1, both excluded")
    student, teacher = _binned(log_probs), _binned(target.detach())
    if direction == "reverse":
        return _kl(student, teacher)
    if direction == "forward":
        return _kl(teacher, student)
    mixture = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def early_weights(gap: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Weights of tokens that fall as a completion leaves what its teacher would write (IW-OPD, arXiv 2606.22600).

    The weight of token t is 1 + gamma (1 - sum over s < t of |gap_s| / sum over all s of |gap_s|). So the first token
    has the weight 1 + gamma, and tokens behind the largest differences have about 1.

    Args:
        gap: [R, T] log-probs of the tokens under the teacher less those under the policy that sampled.
        mask: [R, T] bool, tokens that count.
        gamma: how much more the first token counts, at least 0.

    Returns:
        [R, T] without gradient; of no meaning where the mask is False.
    """
    size = torch.where(mask, gap.detach().abs(), 0.0)
    before = size.cumsum(1) - size
    return 1.0 + gamma * (1.0 - before / size.sum(1, keepdim=True).clamp(min=1e-8))


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(-1)


def _binned(log_probs: Tensor) -> Tensor:
    """[..., K + 1] log-probs, with the bin of the other tokens at the end."""
    # The exp of -1e4 is 0; of -inf, the product with a probability of 0 would be NaN.
    known = log_probs.clamp(min=-1e4)
    rest = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=LEAST).log()
    return torch.cat([known, rest], -1)
