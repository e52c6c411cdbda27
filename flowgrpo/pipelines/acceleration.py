"""Make the denoiser's calls cheaper without a change to the method: attention kernels and compiled blocks.

Libraries do the work. The functions here choose among what the libraries have, and refuse what cannot work.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..weights.blocks import repeated_blocks
from ..weights.trained import trainable_modules

__all__ = ["compile_blocks", "use_attention"]

# Window positions, trees and incomplete batches lead to calls of many sizes, and each size has a graph of its own.
_GRAPHS = 64


def use_attention(pipe: Any, backend: str) -> None:
    """Let the denoisers compute attention with one of the backends of diffusers.

    Args:
        pipe: any pipeline with a denoiser.
        backend: a name of `diffusers.models.attention_dispatch.AttentionBackendName`: native, flash, sage, xformers, …

    Raises:
        ValueError: there is no such backend, its package or device is missing, or the denoiser has no choice of
            backends.
    """
    for key, module in trainable_modules(pipe).items():
        processors = [getattr(part, "processor", None) for part in module.modules()]
        if not any(hasattr(processor, "_attention_backend") for processor in processors):
            raise ValueError(
                f"the attention of {type(module).__name__} ({key}) has no choice of backend in this version of "
                "diffusers; leave model.attention out"
            )
        try:
            module.set_attention_backend(backend)
        except (ValueError, RuntimeError, ImportError) as error:
            raise ValueError(f"model.attention {backend!r} cannot be used: {error}") from None


def compile_blocks(pipe: Any, backend: str = "inductor") -> int:
    """Compile the repeated blocks of the denoisers with `torch.compile`, one graph for each size of a call.

    A graph that is compiled for training may round differently from a graph that is compiled without gradients. Then
    ratios would not be 1 before the first update. So a denoiser always runs the graph for training. If gradients are
    disabled, its output is detached. Sampling then needs the memory of a forward pass that keeps its activations. Call
    this function when adapters and attention backends are in place.

    Args:
        pipe: any pipeline with a denoiser.
        backend: of `torch.compile`.

    Returns:
        The number of blocks that are compiled.

    Raises:
        ValueError: a denoiser has no repeated blocks.
    """
    count = 0
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    for key, module in trainable_modules(pipe).items():
        blocks = repeated_blocks(module)
        if not blocks:
            name = type(module).__name__
            raise ValueError(f"{name} ({key}) has no repeated blocks to compile; turn model.compile off")
        for block in blocks:
            block.compile(backend=backend, dynamic=False)
        module.forward = _with_graph(module.forward)
        count += len(blocks)
    return count


def _with_graph(forward: Any) -> Any:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with torch.enable_grad():
            made = forward(*args, **kwargs)
        return tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, made)

    return run
