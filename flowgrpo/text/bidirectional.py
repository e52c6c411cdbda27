"""Masks of padding for attention of all tokens to all tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def padding_bias(mask: Tensor | None, dtype: torch.dtype, implementation: str) -> Tensor | None:
    """What the attention functions of transformers take for rows with padding on the right.

    Args:
        mask: [N, W], 0 in the padding; None for rows without padding.
        dtype: of the queries.
        implementation: of attention, as transformers names it. Kernels of flash attention take the mask as it is.

    Returns:
        [N, 1, 1, W], which is added to the scores; or `mask` itself.
    """
    if mask is None or "flash" in implementation:
        return mask
    hidden = (mask == 0)[:, None, None, :]
    return torch.zeros(hidden.shape, dtype=dtype, device=mask.device).masked_fill(hidden, torch.finfo(dtype).min)
