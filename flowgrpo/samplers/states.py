"""Where the states of a rollout wait between sampling and training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_host(x: Tensor) -> Tensor:
    """A tensor in host memory: itself if it is there, else a copy, page-locked where a CUDA device will read it."""
    if x.device.type == "cpu":
        return x
    # Waits for the copy: what reads it next may not be the device.
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda").copy_(x)


def brought(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device it is computed with: itself if it waits there."""
    return x.to(device, non_blocking=True)


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat` along the first dimension, page-locked if the parts are."""
    if parts[0].device.type != "cpu" or not parts[0].is_pinned():
        return torch.cat(list(parts))
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return torch.cat(list(parts), out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))
