"""Dream (arXiv 2508.15487) and DiffuCoder (2506.20639) on transformers' Qwen2, loaded without code of their own.

They began as Qwen2.5 and kept its layers. Each token sees all others, and the output at a position is the prediction
of the next token, as in the causal model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_outputs import MaskedLMOutput

from .bidirectional import padding_bias


class DreamConfig(Qwen2Config):
    """The configuration of Dream: Qwen2's, with the id of the mask token."""

    model_type = "Dream"

    def __init__(self, mask_token_id: int = 151666, **others: Any) -> None:
        super().__init__(**others)
        self.mask_token_id = mask_token_id

    def to_dict(self) -> dict[str, Any]:
        """The configuration for config.json, with the base of the rotations where the published code reads it."""
        return with_rope_theta(super().to_dict())


def with_rope_theta(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the base of its rotations at the top, where older versions of transformers look for it."""
    rotations = config.get("rope_parameters") or {}
    return {"rope_theta": rotations["rope_theta"], **config} if "rope_theta" in rotations else config


class DreamModel(Qwen2ForCausalLM):
    """Dream with the class name of the published code; `forward` gives the logits of the token at each position."""

    config_class = DreamConfig

    def __init__(self, config: DreamConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.is_causal = False

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, places: Tensor | None = None
    ) -> MaskedLMOutput:
        """Logits [N, W, V] of N rows of W tokens.

        The prediction for a position is the output at the position before it. The first position has no other before
        it, and has its own output, as in the published code.

        Args:
            input_ids: [N, W].
            attention_mask: [N, W], 0 in the padding on the right; None if there is none.
            places: [N, L] the positions whose logits are wanted, [N, L, V]; all if left out.
        """
        bias = padding_bias(attention_mask, self.dtype, self.config._attn_implementation)
        # Without a mask of each kind of layer, the library would make causal ones.
        masks = dict.fromkeys(self.config.layer_types, bias)
        x = self.model(input_ids=input_ids, attention_mask=masks, use_cache=False).last_hidden_state
        if places is None:
            places = torch.arange(input_ids.shape[1], device=x.device).expand_as(input_ids)
        before = (places - 1).clamp(min=0)
        return MaskedLMOutput(logits=self.lm_head(x.gather(1, before[..., None].expand(-1, -1, x.shape[-1]))))
