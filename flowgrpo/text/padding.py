"""Ragged rows as tensors, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def right_padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, T] with padding after each row, and the mask [B, T] of what is not padding."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([list(row) + [pad] * (width - len(row)) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(width, device=device)[None, :] < lengths[:, None]


def right_padded_values(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """[B, T] of ragged rows, 0 after their ends."""
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [0.0] * (width - len(row)) for row in rows], device=device)
