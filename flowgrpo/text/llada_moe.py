"""LLaDA-MoE (arXiv 2509.24389) on transformers' Qwen3-MoE, loaded without code of its own.

It has the layers of Qwen3-MoE: keys and queries are normalised in each head, and a token goes to its likeliest experts
with the probabilities of a softmax over all experts. Each token sees all others. Weights have the published names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_outputs import MaskedLMOutput

from .bidirectional import padding_bias
from .converted_experts import same_conversion
from .dream import with_rope_theta
from .published_settings import other_settings

# What the published weights have. The published code has further choices, and no published model uses them.
_EXPECTED: dict[str, Any] = {
    "shared_expert_intermediate_size": None, "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax", "partial_rotary_factor": 1, "qk_layernorm": True, "clip_qkv": None,
    "norm_topk_prob": False,
}  # fmt: skip


class LLaDAMoEConfig(Qwen3MoeConfig):
    """The configuration of LLaDA-MoE: the names in its config.json are translated into the names of Qwen3-MoE."""

    model_type = "lladamoe"

    def __init__(
        self,
        expert_intermediate_size: int = 1024,
        dense_intermediate_size: int = 8192,
        moe_layer_freq: Sequence[int] = (),
        norm_topk_prob: bool | None = None,
        mask_token_id: int = 156895,
        **others: Any,
    ) -> None:
        for key in ("moe_intermediate_size", "intermediate_size", "mlp_only_layers", "num_local_experts"):
            others.pop(key, None)
        if others.get("num_key_value_heads") is None:
            others["num_key_value_heads"] = others.get("num_attention_heads", 16)
        sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_experts": 64}
        super().__init__(
            moe_intermediate_size=expert_intermediate_size,
            intermediate_size=dense_intermediate_size,
            mlp_only_layers=[place for place, mixed in enumerate(moe_layer_freq) if not mixed],
            norm_topk_prob=bool(norm_topk_prob),
            **{"vocab_size": 157184, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, **sizes, **others},
        )
        self.expert_intermediate_size, self.dense_intermediate_size = expert_intermediate_size, dense_intermediate_size
        self.moe_layer_freq, self.mask_token_id = list(moe_layer_freq), mask_token_id

    @classmethod
    def get_config_dict(cls, *args: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a config.json says. Some published ones have the type of LLaDA without experts."""
        found, rest = super().get_config_dict(*args, **options)
        return {**found, "model_type": cls.model_type}, rest

    def to_dict(self) -> dict[str, Any]:
        """The configuration for config.json, with what the published code reads."""
        found = with_rope_theta(super().to_dict())
        published = {"partial_rotary_factor": 1, "qk_layernorm": True, "shared_expert_intermediate_size": None}
        return {
            **published, **found, "num_experts": self.num_experts, "moe_layer_freq": self._layers(),
        }  # fmt: skip

    def _layers(self) -> list[int]:
        return self.moe_layer_freq or [1] * self.num_hidden_layers

    def faults(self) -> list[str]:
        """Settings of layers that `LLaDAMoEModelLM` does not have, one message for each."""
        return other_settings(self, _EXPECTED, "LLaDA-MoE")


class LLaDAMoEModelLM(Qwen3MoeForCausalLM):
    """LLaDA-MoE with the class name of the published code; `forward` gives the logits of the token at each position.

    Raises:
        ValueError: the configuration asks for layers that no published LLaDA-MoE has.
    """

    config_class = LLaDAMoEConfig

    def __init__(self, config: LLaDAMoEConfig) -> None:
        if faults := config.faults():
            raise ValueError(f"this LLaDA-MoE cannot be loaded: {'; '.join(faults)}")
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.is_causal = False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers reads the source of a class's module to find out, and the experts are in another one.
        return bool(Qwen3MoeForCausalLM._can_set_experts_implementation())

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, places: Tensor | None = None
    ) -> MaskedLMOutput:
        """Logits [N, W, V] of N rows of W tokens.

        Args:
            input_ids: [N, W].
            attention_mask: [N, W], 0 in the padding on the right; None if there is none.
            places: [N, L] the positions whose logits are wanted, [N, L, V]; all if left out.
        """
        x = self.model.embed_tokens(input_ids)
        bias = padding_bias(attention_mask, x.dtype, self.config._attn_implementation)
        positions = torch.arange(input_ids.shape[1], device=x.device)[None]
        rotation = self.model.rotary_emb(x, positions)
        for layer in self.model.layers:
            x = layer(x, attention_mask=bias, position_ids=positions, position_embeddings=rotation)
        x = self.model.norm(x)
        if places is not None:
            x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        return MaskedLMOutput(logits=self.lm_head(x))


same_conversion(LLaDAMoEConfig.model_type)
