"""LLaDA 2 (arXiv 2512.15745), loaded without code of its own.

It writes block after block. Each layer has mixtures of experts: experts are in groups, a token goes to experts of its
best groups, and some experts see all tokens (DeepSeek-V3, arXiv 2412.19437, §2.1.2). Modules have the names of the
published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, eager_attention_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeMLP

from .block_models import WritesBlocks
from .converted_experts import experts_of, same_conversion
from .rotations import Rotation, rotated, rotation


class LLaDA2MoeConfig(PretrainedConfig):
    """The configuration of LLaDA 2, by the names of its config.json. The defaults are LLaDA2.0-mini's."""

    model_type = "llada2_moe"

    def __init__(
        self,
        vocab_size: int = 157184,
        hidden_size: int = 2048,
        intermediate_size: int = 5120,
        num_hidden_layers: int = 20,
        num_attention_heads: int = 16,
        num_key_value_heads: int = 4,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 32768,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 600000.0,
        partial_rotary_factor: float = 0.5,
        num_experts: int = 256,
        num_shared_experts: int | None = 1,
        num_experts_per_tok: int = 8,
        n_group: int = 8,
        topk_group: int = 4,
        routed_scaling_factor: float = 2.5,
        moe_intermediate_size: int = 512,
        first_k_dense_replace: int = 1,
        use_qkv_bias: bool = False,
        use_bias: bool = False,
        initializer_range: float = 0.02,
        mask_token_id: int = 156895,
        block_size: int = 32,
        **others: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act, self.max_position_embeddings = hidden_act, max_position_embeddings
        self.rms_norm_eps, self.rope_theta = rms_norm_eps, rope_theta
        self.partial_rotary_factor = partial_rotary_factor
        self.num_experts, self.num_shared_experts = num_experts, num_shared_experts
        self.num_experts_per_tok, self.n_group, self.topk_group = num_experts_per_tok, n_group, topk_group
        self.routed_scaling_factor, self.moe_intermediate_size = routed_scaling_factor, moe_intermediate_size
        self.first_k_dense_replace = first_k_dense_replace
        self.use_qkv_bias, self.use_bias, self.initializer_range = use_qkv_bias, use_bias, initializer_range
        self.mask_token_id, self.block_size = mask_token_id, block_size
        others.pop("tie_word_embeddings", None)
        super().__init__(tie_word_embeddings=False, **others)


class LLaDA2MoeAttention(nn.Module):
    """Attention with one layer for queries, keys and values; both of the former are normalised in each head."""

    is_causal = False

    def __init__(self, config: LLaDA2MoeConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        wide = config.num_attention_heads * config.head_dim
        self.query_key_value = nn.Linear(
            config.hidden_size, sum(self.heads) * config.head_dim, bias=config.use_qkv_bias
        )
        self.query_layernorm = LlamaRMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.key_layernorm = LlamaRMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.dense = nn.Linear(wide, config.hidden_size, bias=config.use_bias)

    def forward(self, x: Tensor, mask: Tensor, turn: Rotation, cache: Any) -> Tensor:
        """[N, W, D]; the cache gets the keys and values."""
        joined = self.query_key_value(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        query, key, value = joined.split(self.heads, dim=1)
        query, key = rotated(self.query_layernorm(query), turn), rotated(self.key_layernorm(key), turn)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        implementation = self.config._attn_implementation
        attend = eager_attention_forward if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        found = attend(self, query, key, value, mask, scaling=self.config.head_dim**-0.5, dropout=0.0)[0]
        return self.dense(found.flatten(2))  # type: ignore[no-any-return]


class LLaDA2MoeGate(nn.Module):
    """Chooses experts. The two best experts of each group decide between groups; then the best experts are chosen."""

    expert_bias: Tensor

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers [T, K] of the experts of each token, and their weights, float32."""
        config = self.config
        scores = nn.functional.linear(x.float(), self.weight.float()).sigmoid()
        # The bias has a say in the choice, and none in the weights.
        wanted = (scores + self.expert_bias).unflatten(1, (config.n_group, -1))
        groups = wanted.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1, sorted=False).indices
        open_groups = torch.zeros_like(wanted[..., 0]).scatter(1, groups, 1.0).bool()
        chosen = (
            wanted.masked_fill(~open_groups[..., None], -torch.inf).flatten(1).topk(config.num_experts_per_tok).indices
        )
        weights = scores.gather(1, chosen)
        if config.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * config.routed_scaling_factor


class LLaDA2MoeSparseMoeBlock(nn.Module):
    """Experts that a gate chooses, and experts for all tokens."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.gate, self.experts = LLaDA2MoeGate(config), experts_of(config)
        shared = config.num_shared_experts
        self.shared_experts = Qwen3MoeMLP(config, config.moe_intermediate_size * shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, W, D]."""
        tokens = x.flatten(0, 1)
        found: Tensor = self.experts(tokens, *self.gate(tokens)).view_as(x)
        return found if self.shared_experts is None else found + self.shared_experts(x)


class LLaDA2MoeDecoderLayer(nn.Module):
    """Attention, then a feed-forward network or a mixture of experts."""

    def __init__(self, config: LLaDA2MoeConfig, layer: int) -> None:
        super().__init__()
        self.attention = LLaDA2MoeAttention(config, layer)
        mixed = layer >= config.first_k_dense_replace
        self.mlp = LLaDA2MoeSparseMoeBlock(config) if mixed else Qwen3MoeMLP(config, config.intermediate_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, mask: Tensor, turn: Rotation, cache: Any = None) -> Tensor:
        """[N, W, D]."""
        x = x + self.attention(self.input_layernorm(x), mask, turn, cache)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class States:
    """What the layers give.

    Attributes:
        last_hidden_state: [N, W, D].
        cache: keys and values of all tokens; None if they are not kept.
    """

    last_hidden_state: Tensor
    cache: Any


class LLaDA2MoeModel(nn.Module):
    """The embeddings and the layers."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LLaDA2MoeDecoderLayer(config, k) for k in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        use_cache: bool = False,
        cache: Any = None,
    ) -> States:
        """The states of N rows of W tokens, and the cache.

        Args:
            input_ids: [N, W].
            attention_mask: [N, 1, W, P + W], which is added to the scores of attention.
            position_ids: [N, W] place of each token in its text.
            use_cache: whether keys and values are kept.
            cache: keys and values of P tokens before these.
        """
        cache = DynamicCache() if use_cache and cache is None else cache
        x = self.word_embeddings(input_ids)
        size = int(self.config.head_dim * self.config.partial_rotary_factor)
        cosine, sine = rotation(position_ids, size, self.config.rope_theta)
        # All heads turn alike.
        turn = (cosine[:, None].to(x.dtype), sine[:, None].to(x.dtype))
        for layer in self.layers:
            x = layer(x, attention_mask, turn, cache)
        return States(self.norm(x), cache)


class _PreTrained(PreTrainedModel):
    config_class: ClassVar[type[LLaDA2MoeConfig]] = LLaDA2MoeConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[list[str]] = ["LLaDA2MoeDecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__(config)
        self.model = LLaDA2MoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        for name, weight in module.named_parameters(recurse=False):
            # Gates and joined experts are no layers that the library knows.
            unknown = name in ("gate_up_proj", "down_proj") or isinstance(module, LLaDA2MoeGate)
            if unknown and not getattr(weight, "_is_hf_initialized", False):
                weight.data.normal_(0.0, self.config.initializer_range)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers reads the source of a class's module to find out, and the experts are in another one.
        return bool(Qwen3MoeForCausalLM._can_set_experts_implementation())

    def get_input_embeddings(self) -> nn.Module:
        """The table of token embeddings."""
        return self.model.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table of token embeddings."""
        self.model.word_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        return self.lm_head


class LLaDA2MoeModelLM(WritesBlocks, _PreTrained):  # type: ignore[misc]
    """LLaDA 2 with the class name of the published code.

    Raises:
        ValueError: the configuration asks for layers that no published LLaDA 2 has.
    """

    expected: ClassVar[Mapping[str, Any]] = {
        "use_qk_norm": True, "use_sliding_window": False, "rope_scaling": None, "norm_head": False,
        "score_function": "sigmoid", "norm_topk_prob": True,
    }  # fmt: skip
    kind = "LLaDA 2"


same_conversion(LLaDA2MoeConfig.model_type)
