"""Which of PyTorch's kernels a process may use on a GPU. On a CPU nothing changes."""

from __future__ import annotations

import os

import torch

__all__ = ["in_a_fixed_order", "without_cudnn_attention"]


def without_cudnn_attention() -> None:
    """Take cuDNN out of PyTorch's choice of attention kernels, for the whole process.

    PyTorch 2.11 and newer prefer cuDNN's attention on Hopper GPUs. On an H100 its backward pass ended in an illegal
    memory access for a FLUX transformer in bfloat16, and in a gradient of NaN for a small one; PyTorch's issue 196678
    has a case of its own. A diffusers backend that is asked for by name, `model.attention: _native_cudnn`, is still
    used.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def in_a_fixed_order() -> None:
    """Let sums on a GPU have a fixed order where PyTorch has such a kernel, for the whole process.

    Then equal runs give equal bits. Call it before anything is computed on a GPU. Operations without such a kernel give
    a warning. Attention in float32 is computed without a fused kernel, because the gradient of the fused one has no
    fixed order.
    """
    # cuBLAS reads it when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
