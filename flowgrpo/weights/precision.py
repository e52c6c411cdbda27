"""Number formats of a pipeline's frozen parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import diffusers
import torch
from diffusers import ModelMixin
from torch import Tensor, nn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["cast_base", "dtype_argument", "in_dtype"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dtype_argument() -> str:
    """The name of the number format among the arguments of diffusers' `from_pretrained`.

    diffusers calls it `dtype` from 0.40 on and drops the older name in 1.0. Older versions ignore `dtype`.
    """
    major, minor = (int(part) for part in diffusers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (0, 40) else "torch_dtype"


def in_dtype(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The argument with which diffusers' `from_pretrained` loads weights in a number format."""
    return {dtype_argument(): dtype}


def cast_base(pipe: DiffusionPipeline, dtype: torch.dtype, *, vae_float32: bool = False) -> None:
    """Convert a pipeline's weights as `from_pretrained(dtype=dtype)` would have loaded them.

    Parts that their model class keeps in float32 stay in float32. Buffers that are computed and not loaded (rotary
    frequencies) stay unchanged. A plain `pipe.to(dtype)` would round both. Call this function before
    `TrainedWeights.lora` or `.full`, which give the trained weights a separate dtype.

    Args:
        pipe: any pipeline without adapters.
        dtype: float32, bfloat16 or float16.
        vae_float32: keep the `vae` in float32. Some pipelines (SD3, FLUX) pass latents in the transformer's dtype to
            the `vae`, so the caller must convert latents before decoding.

    Raises:
        ValueError: the dtype is none of these, or the pipeline has an adapter.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"cannot cast a pipeline to {dtype}; use torch.float32, torch.bfloat16 or torch.float16")
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    for name, part in parts.items():
        if getattr(part, "peft_config", None):
            raise ValueError(
                f"{name} has an adapter; call cast_base before you add the adapter, so that the adapter keeps its dtype"
            )
    for name, part in parts.items():
        _cast(part, torch.float32 if name == "vae" and vae_float32 else dtype)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    float32_parts = _float32_parts(module, dtype)

    def converted(name: str, tensor: Tensor) -> Tensor:
        keep = any(f".{part}." in f".{name}." for part in float32_parts)
        return tensor.to(torch.float32 if keep else dtype) if tensor.is_floating_point() else tensor

    for name, parameter in module.named_parameters():
        parameter.data = converted(name, parameter.data)
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                owner._buffers[name] = converted(f"{prefix}.{name}", buffer)


def _float32_parts(module: nn.Module, dtype: torch.dtype) -> set[str]:
    """Name parts that a class keeps in float32: for any 16-bit dtype in diffusers, for float16 in transformers."""
    parts: set[str] = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if isinstance(module, ModelMixin) or dtype is torch.float16:
        declared = getattr(module, "_keep_in_fp32_modules", None) or ()
        parts |= {declared} if isinstance(declared, str) else set(declared)
    return parts
