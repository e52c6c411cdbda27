"""The divergence of next-token distributions from a teacher's distributions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LEAST = 1e-6
"""Least probability of all the other tokens together."""


def coarse_kl(log_probs: Tensor, target: Tensor, *, direction: Literal["reverse", "forward"] = "reverse") -> Tensor:
    """KL between two distributions over K likely tokens and one bin for all others, over the last dimension.

    It is at most the KL over all tokens, and equal to it if the K tokens are all tokens. The likelihood of the other
    tokens counts as `LEAST` at the least.

    Args:
        log_probs: [..., K] log-probs of the student, with gradient.
        target: [..., K] log-probs of the same tokens under the teacher; -inf for a token without probability.
        direction: "reverse" is the KL of the student from the teacher, "forward" the KL of the teacher from the
            student.

    Returns:
        [...], not negative.

    Raises:
        ValueError: If shapes do not match.
    """
    if log_probs.shape != target.shape:
        raise ValueError(f"`log_probs` has shape {tuple(log_probs.shape)} and `target` {tuple(target.shape)}")
    student, teacher = _binned(log_probs), _binned(target.detach())
    first, second = (student, teacher) if direction == "reverse" else (teacher, student)
    return (first.exp() * (first - second)).sum(-1)


def _binned(log_probs: Tensor) -> Tensor:
    """[..., K + 1] log-probs, with the bin of the other tokens at the end."""
    # The exp of -1e4 is 0; of -inf, the product with a probability of 0 would be NaN.
    known = log_probs.clamp(min=-1e4)
    rest = (1 - known.exp().sum(-1, keepdim=True)).clamp(min=LEAST).log()
    return torch.cat([known, rest], -1)
