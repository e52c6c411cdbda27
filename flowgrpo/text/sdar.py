"""SDAR (arXiv 2510.06303) and TraDo (2509.06949) on transformers' Qwen3, loaded without code of their own.

They began as Qwen3 and kept its layers. They write block after block: a token sees its own block and all blocks before
it, and the output at a position is the prediction of the token at this position. Weights have the published names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from .block_models import WritesBlocks
from .converted_experts import same_conversion
from .dream import with_rope_theta


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


class _SDAR(WritesBlocks):
    """What the two classes of models share."""

    expected: ClassVar[Mapping[str, Any]] = {"use_sliding_window": False}
    kind = "SDAR"


class SDARForCausalLM(_SDAR, Qwen3ForCausalLM):  # type: ignore[misc]
    """SDAR with the class name of the published code.

    Raises:
        ValueError: the configuration asks for layers that no published SDAR has.
    """

    config_class = SDARConfig


class SDARMoeForCausalLM(_SDAR, Qwen3MoeForCausalLM):  # type: ignore[misc]
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
