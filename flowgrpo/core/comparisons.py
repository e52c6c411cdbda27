"""Rewards from comparisons of the samples of a group with each other."""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import as_precise


def win_rates(preference: Tensor) -> Tensor:
    """Share of the others that each sample beats (self-play preference optimisation, arXiv 2401.04056).

    The reward of sample i is the mean over j of P(i beats j), which no score has to exist for: preferences may run
    in circles. P(i beats j) is the mean of P[i, j] and 1 - P[j, i], so that a judge's liking for the one shown first
    cancels out where both orders were asked; where one was, that one counts. The win rates of n samples of which all
    pairs were compared add up to n / 2.

    Args:
        preference: [..., n, n], P[i, j] in [0, 1] that i beats j (0.5 for a tie); NaN where it was not asked. The
            diagonal is ignored.

    Returns:
        [..., n] in [0, 1], float32 at least; NaN for a sample that was compared with none.

    Raises:
        ValueError: A matrix that is not square, or a value outside 0..1.
    """
    if preference.dim() < 2 or preference.shape[-1] != preference.shape[-2]:
        raise ValueError(
            f"`preference` has shape {tuple(preference.shape)}; give a square matrix per group, (..., n, n)"
        )
    itself = torch.eye(preference.shape[-1], dtype=torch.bool, device=preference.device)
    beats = as_precise(preference).masked_fill(itself, torch.nan)
    if bool(((beats < 0) | (beats > 1)).any()):
        raise ValueError("`preference` holds a value outside 0..1; give the probability that the row beats the column")
    both = torch.stack([beats, 1.0 - beats.mT]).nanmean(0)
    return both.nanmean(-1).to(torch.promote_types(preference.dtype, torch.float32))
