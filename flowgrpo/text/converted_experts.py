"""Weights of mixtures of experts as transformers stores them in memory."""

from __future__ import annotations


def same_conversion(model_type: str) -> None:
    """Let newer versions of transformers join the experts of a type's layers into one tensor, as for Qwen3-MoE."""
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )
    except ImportError:
        return
    mapping = get_checkpoint_conversion_mapping("qwen3_moe")
    if mapping is not None:
        register_checkpoint_conversion_mapping(model_type, mapping, overwrite=True)
