"""SDAR (arXiv 2510.06303) and TraDo (2509.06949) on transformers' Qwen3, loaded without code of their own.

They began as Qwen3 and kept its layers. They write block after block: a token sees its own block and all blocks before
it, and the output at a position is the prediction of the token at this position. Weights have the published names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_outputs import MaskedLMOutput

from .converted_experts import same_conversion
from .dream import with_rope_theta
from .key_value_cache import cache_argument, cache_of
from .published_settings import other_settings

_EXPECTED: dict[str, Any] = {"use_sliding_window": False}


class _InBlocks:
    """What the two configurations add: the id of the mask token, and the size of a block."""

    def __init__(self, mask_token_id: int = 151669, block_size: int = 4, **others: Any) -> None:
        super().__init__(**others)
        self.mask_token_id, self.block_size = mask_token_id, block_size

    def to_dict(self) -> dict[str, Any]:
        """The configuration for config.json, with the base of the rotations where the published code reads it."""
        return with_rope_theta(super().to_dict())  # type: ignore[misc]


class SDARConfig(_InBlocks, Qwen3Config):  # type: ignore[misc]
    """The configuration of SDAR: Qwen3's, with two more entries."""

    model_type = "sdar"
    # Newer versions of transformers make an `__init__` for a class that has none of its own.
    __init__ = _InBlocks.__init__


class SDARMoeConfig(_InBlocks, Qwen3MoeConfig):  # type: ignore[misc]
    """The configuration of SDAR with mixtures of experts: Qwen3-MoE's, with two more entries."""

    model_type = "sdar_moe"
    __init__ = _InBlocks.__init__


class _WritesBlocks:
    """What the two classes of models share."""

    config: Any
    model: Any
    lm_head: Any

    def __init__(self, config: Any) -> None:
        if faults := other_settings(config, _EXPECTED, "SDAR"):
            raise ValueError(f"this SDAR cannot be loaded: {'; '.join(faults)}")
        super().__init__(config)  # type: ignore[call-arg]

    def forward(
        self, input_ids: Tensor, seen: Tensor, positions: Tensor | None = None, places: Tensor | None = None
    ) -> MaskedLMOutput:
        """Logits [N, W, V] of N rows of W tokens.

        Args:
            input_ids: [N, W].
            seen: [N, W, W] bool: whether a token sees another, see `core.completion_blocks.seen_in_blocks`.
            positions: [N, W] place of each token in its text; from 0 on if left out.
            places: [N, L] the positions in the row whose logits are wanted, [N, L, V]; all if left out.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.model(
            input_ids=input_ids, attention_mask=self._bias(seen), position_ids=positions, use_cache=False
        ).last_hidden_state
        return MaskedLMOutput(logits=self.lm_head(x if places is None else _at(x, places)))

    def with_past(
        self, input_ids: Tensor, seen: Tensor, positions: Tensor, places: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        """Logits [N, K, V] of tokens that follow others, and the cache with the keys and values of all of them.

        Args:
            input_ids: [N, W] the new tokens.
            seen: [N, W, P + W] bool: whether a new token sees a token, the P tokens of the cache first.
            positions: [N, W] place of each new token in its text.
            places: [N, K] the positions among the new tokens whose logits are wanted.
            cache: of the call before; None if nothing came before.
        """
        given = {} if cache is None else {cache_argument(self.model): cache}
        output = self.model(
            input_ids=input_ids, attention_mask=self._bias(seen), position_ids=positions, use_cache=True, **given
        )
        return self.lm_head(_at(output.last_hidden_state, places)), cache_of(output)

    def _bias(self, seen: Tensor) -> Tensor:
        """[N, 1, W, W'] what attention adds to its scores."""
        dtype = self.lm_head.weight.dtype
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return bias.masked_fill(~seen, torch.finfo(dtype).min)[:, None]


def _at(x: Tensor, places: Tensor) -> Tensor:
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


class SDARForCausalLM(_WritesBlocks, Qwen3ForCausalLM):  # type: ignore[misc]
    """SDAR with the class name of the published code.

    Raises:
        ValueError: the configuration asks for layers that no published SDAR has.
    """

    config_class = SDARConfig


class SDARMoeForCausalLM(_WritesBlocks, Qwen3MoeForCausalLM):  # type: ignore[misc]
    """SDAR with mixtures of experts, with the class name of the published code.

    Raises:
        ValueError: the configuration asks for layers that no published SDAR has.
    """

    config_class = SDARMoeConfig

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers reads the source of a class's module to find out, and the experts are in another one.
        return bool(Qwen3MoeForCausalLM._can_set_experts_implementation())


same_conversion(SDARMoeConfig.model_type)
