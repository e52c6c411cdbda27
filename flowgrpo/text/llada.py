"""LLaDA (arXiv 2502.09992) on the layers of transformers, so that its weights are loaded without its own code.

LLaDA is a transformer like Llama whose tokens see all others. Modules have the names of the published code. So weights
and adapters are interchangeable with the published code.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, eager_attention_forward

from .bidirectional import padding_bias
from .published_settings import other_settings
from .rotations import Rotation, rotated, rotation

# What the published weights have. The published configuration has further keys that choose among layers, and none of
# the published models uses the other choices.
_EXPECTED: dict[str, Any] = {
    "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True, "alibi": False,
    "attention_layer_norm": False, "bias_for_layer_norm": False, "layer_norm_with_affine": True, "block_group_size": 1,
    "input_emb_norm": False, "scale_logits": False,
}  # fmt: skip


class LLaDAConfig(PretrainedConfig):
    """The configuration of LLaDA, by the names of its config.json."""

    model_type = "llada"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_sequence_length",
        "initializer_range": "init_std",
    }

    def __init__(
        self,
        vocab_size: int = 126464,
        embedding_size: int | None = None,
        d_model: int = 4096,
        n_heads: int = 32,
        n_kv_heads: int | None = None,
        n_layers: int = 32,
        mlp_ratio: int = 4,
        mlp_hidden_size: int | None = None,
        max_sequence_length: int = 4096,
        rope_theta: float = 10000.0,
        rope_full_precision: bool = True,
        rms_norm_eps: float = 1e-5,
        include_bias: bool = False,
        include_qkv_bias: bool = False,
        weight_tying: bool = False,
        init_std: float = 0.02,
        mask_token_id: int = 126336,
        **others: Any,
    ) -> None:
        self.vocab_size, self.embedding_size = vocab_size, embedding_size
        self.d_model, self.n_heads, self.n_kv_heads, self.n_layers = d_model, n_heads, n_kv_heads, n_layers
        self.mlp_ratio, self.mlp_hidden_size = mlp_ratio, mlp_hidden_size
        self.max_sequence_length, self.rope_theta = max_sequence_length, rope_theta
        self.rope_full_precision, self.rms_norm_eps = rope_full_precision, rms_norm_eps
        self.include_bias, self.include_qkv_bias, self.weight_tying = include_bias, include_qkv_bias, weight_tying
        self.init_std, self.mask_token_id = init_std, mask_token_id
        others.pop("tie_word_embeddings", None)
        super().__init__(tie_word_embeddings=False, **others)

    @property
    def rows(self) -> int:
        """Rows of the table of embeddings, which may be longer than the vocabulary."""
        return self.embedding_size or self.vocab_size

    @property
    def inner(self) -> int:
        """Width of the feed-forward layers."""
        return self.mlp_hidden_size or self.mlp_ratio * self.d_model

    @property
    def key_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.n_kv_heads or (1 if getattr(self, "multi_query_attention", None) else self.n_heads)

    def faults(self) -> list[str]:
        """Settings of layers that `LLaDAModelLM` does not have, one message for each."""
        return other_settings(self, _EXPECTED, "LLaDA")


class MMadaConfig(LLaDAConfig):
    """The configuration of MMaDA (arXiv 2505.15809): LLaDA with a longer vocabulary, for pictures as tokens."""

    model_type = "mmada"

    # Newer versions of transformers give a class without one a constructor of their own.
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)


class LLaDALlamaBlock(nn.Module):
    """Attention of all tokens to all tokens, then a gated feed-forward network."""

    is_causal = False

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.config, width, bias = config, config.d_model, config.include_bias
        self.head = width // config.n_heads
        self.num_key_value_groups = config.n_heads // config.key_heads
        inward = bias or config.include_qkv_bias
        self.attn_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.q_proj = nn.Linear(width, width, bias=inward)
        self.k_proj = nn.Linear(width, config.key_heads * self.head, bias=inward)
        self.v_proj = nn.Linear(width, config.key_heads * self.head, bias=inward)
        self.attn_out = nn.Linear(width, width, bias=bias)
        self.ff_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.ff_proj = nn.Linear(width, config.inner, bias=bias)
        self.up_proj = nn.Linear(width, config.inner, bias=bias)
        self.ff_out = nn.Linear(config.inner, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None, turn: Rotation) -> Tensor:
        """One block: x is [N, W, D]."""
        seen = self.attn_norm(x)
        query, key, value = (
            layer(seen).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = self._rotated(query, turn), self._rotated(key, turn)
        implementation = self.config._attn_implementation
        attend = eager_attention_forward if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        found = attend(self, query, key, value, mask, scaling=self.head**-0.5, dropout=0.0)[0]
        x = x + self.attn_out(found.flatten(2))
        seen = self.ff_norm(x)
        return x + self.ff_out(nn.functional.silu(self.ff_proj(seen)) * self.up_proj(seen))

    def _rotated(self, x: Tensor, turn: Rotation) -> Tensor:
        """Heads [N, H, W, K] turned by their positions."""
        wide = x.float() if self.config.rope_full_precision else x
        cosine, sine = turn
        return rotated(wide, (cosine.to(wide.dtype), sine.to(wide.dtype))).to(x.dtype)


class LLaDAModel(nn.Module):
    """The embeddings, the blocks and the output layer, under the names of the published weights."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        parts = {
            "wte": nn.Embedding(config.rows, config.d_model),
            "blocks": nn.ModuleList(LLaDALlamaBlock(config) for _ in range(config.n_layers)),
            "ln_f": LlamaRMSNorm(config.d_model, eps=config.rms_norm_eps),
        }
        if not config.weight_tying:
            parts["ff_out"] = nn.Linear(config.d_model, config.rows, bias=config.include_bias)
        self.transformer = nn.ModuleDict(parts)


class LLaDAModelLM(PreTrainedModel):
    """LLaDA with the class name of the published code; `forward` gives the logits of the token at each position.

    Raises:
        ValueError: the configuration asks for layers that no published LLaDA has.
    """

    config_class: ClassVar[type[LLaDAConfig]] = LLaDAConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[list[str]] = ["LLaDALlamaBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flash_attn_2 = True
    _supports_attention_backend = True

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__(config)
        if faults := config.faults():
            raise ValueError(f"this LLaDA cannot be loaded: {'; '.join(faults)}")
        self.model = LLaDAModel(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The table of token embeddings."""
        return self.model.transformer["wte"]

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table of token embeddings."""
        self.model.transformer["wte"] = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The output layer; None if the embeddings take its place."""
        return None if self.config.weight_tying else self.model.transformer["ff_out"]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, places: Tensor | None = None
    ) -> MaskedLMOutput:
        """Logits [N, W, V] of N rows of W tokens.

        Args:
            input_ids: [N, W].
            attention_mask: [N, W], 0 in the padding on the right; None if there is none.
            places: [N, L] the positions whose logits are wanted, [N, L, V]; all if left out.
        """
        parts = self.model.transformer
        x = parts["wte"](input_ids)
        mask = padding_bias(attention_mask, x.dtype, self.config._attn_implementation)
        tokens = torch.arange(input_ids.shape[1], device=input_ids.device)
        turn = rotation(tokens, self.config.d_model // self.config.n_heads, self.config.rope_theta)
        for block in parts["blocks"]:
            x = block(x, mask, turn)
        if places is not None:
            x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        x = parts["ln_f"](x)
        logits = nn.functional.linear(x, parts["wte"].weight) if self.config.weight_tying else parts["ff_out"](x)
        return MaskedLMOutput(logits=logits)


class MMadaModelLM(LLaDAModelLM):
    """MMaDA with the class name of the published code, for texts."""

    config_class = MMadaConfig
