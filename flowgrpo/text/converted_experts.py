"""Mixtures of experts as transformers stores them in memory: joined into one tensor, in newer versions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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


def experts_of(config: Any) -> nn.Module:
    """The experts of a layer, with the sizes of Qwen3-MoE's; called with tokens, chosen experts and their weights."""
    try:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError:
        return ListedExperts(config)
    return Qwen3MoeExperts(config)  # type: ignore[no-any-return]


class ListedExperts(nn.ModuleList):
    """Experts one by one, for versions of transformers that do not join them.

    Args:
        config: with `num_experts`, `hidden_size`, `moe_intermediate_size` and `hidden_act`.
    """

    def __init__(self, config: Any) -> None:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

        super().__init__(Qwen3MoeMLP(config, config.moe_intermediate_size) for _ in range(config.num_experts))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, D] the weighted sum of the experts' outputs.

        Args:
            x: [T, D] tokens.
            chosen: [T, K] numbers of the experts of each token.
            weights: [T, K] weight of each of them.
        """
        found = torch.zeros_like(x)
        for number, expert in enumerate(self):
            token, place = torch.where(chosen == number)
            if len(token):
                found = found.index_add(0, token, expert(x[token]) * weights[token, place, None].to(x.dtype))
        return found
