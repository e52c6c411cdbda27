"""The number formats in which a processor computes fast."""

from __future__ import annotations

import torch

_BFLOAT16 = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
"""Functions of `torch.cpu`, one for each set of instructions that multiply bfloat16."""
_FLOAT16 = ("_is_amx_fp16_supported",)


def has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16; also True if torch does not say."""
    return _has(_BFLOAT16)


def fast_precision() -> torch.autocast:
    """A context in which a model computes in bfloat16, or in float32 on a processor without bfloat16 instructions.

    In bfloat16 such a processor rounds every number by itself. A step of the denoiser then takes 2.5 times as long as
    in float32.
    """
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bfloat16())


def notes_on_format(dtype: str, device: torch.device) -> list[str]:
    """What the user of a `model.dtype` should know about its speed; empty if nothing.

    On a processor without the instructions, an iteration of the recipe `default` took 2.5 times as long in bfloat16 as
    in float32, and 7 times as long in float16.
    """
    if device.type != "cpu":
        return []
    if dtype == "bfloat16" and not has_bfloat16():
        return [
            "this processor has no instructions for bfloat16, so model.dtype bfloat16 is likely two to three times "
            "slower than float32; it takes half of the memory"
        ]
    if dtype == "float16" and not _has(_FLOAT16):
        return [
            "on most processors model.dtype float16 is several times slower than float32; use float32, or bfloat16 to "
            "save memory"
        ]
    return []


def _has(names: tuple[str, ...]) -> bool:
    known = [asked() for name in names if (asked := getattr(torch.cpu, name, None)) is not None]
    return any(known) or not known
