"""The number format in which a world is built fastest on a processor."""

from __future__ import annotations

import torch

_BFLOAT16 = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
"""Functions of `torch.cpu`, one for each set of instructions that multiply bfloat16."""


def has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16; also True if torch does not say."""
    known = [asked() for name in _BFLOAT16 if (asked := getattr(torch.cpu, name, None)) is not None]
    return any(known) or not known


def fast_precision() -> torch.autocast:
    """A context in which a model computes in bfloat16, or in float32 on a processor without bfloat16 instructions.

    In bfloat16 such a processor rounds every number by itself. A step of the denoiser then takes 2.5 times as long as
    in float32.
    """
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bfloat16())
