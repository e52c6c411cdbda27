"""Rewards from comparisons of the samples of a group with each other."""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import as_precise


def win_rates(preference: Tensor) -> Tensor:
    """Share of the other samples that each sample beats (self-play preference optimisation, arXiv 2401.04056).

    The reward of sample i is the mean over j of P(i beats j). It needs no score: preferences may run in circles. P(i
    beats j) is the mean of P[i, j] and 1 - P[j, i]. So if both orders were asked, a judge's preference for the sample
    shown first cancels out. If only one order was asked, its answer counts alone. If all pairs of n samples were
    compared, the win rates add up to n / 2.

    Args:
        preference: [..., n, n], the probability P[i, j] in [0, 1] that i beats j (0.5 for a tie); NaN where the pair
            was not asked. The diagonal is ignored.

    Returns:
        [..., n] in [0, 1], float32 at least; NaN for a sample that was compared with no other.

    Raises:
        ValueError: If a matrix is not square, or a value is outside 0..1.
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
