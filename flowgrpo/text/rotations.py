"""Rotary positions (RoFormer, arXiv 2104.09864), for the models whose layers are here."""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine [..., W, R] of the angles of W positions."""


def rotation(positions: Tensor, size: int, base: float) -> Rotation:
    """Cosine and sine [..., W, R], float32.

    Args:
        positions: [..., W] place of each token in its text.
        size: the number R of turned numbers of a head, even.
        base: base of the angles, `rope_theta`.
    """
    rates = 1.0 / base ** (torch.arange(0, size, 2, device=positions.device, dtype=torch.float) / size)
    angles = positions[..., None].float() * rates
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, turn: Rotation) -> Tensor:
    """Heads [..., W, K], in which the first R numbers are turned; of the dtype of x if the angles are."""
    cosine, sine = turn
    turned, rest = x[..., : cosine.shape[-1]], x[..., cosine.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cosine + torch.cat((-second, first), dim=-1) * sine, rest), dim=-1)
