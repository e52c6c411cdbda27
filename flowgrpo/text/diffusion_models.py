"""Diffusion language models that transformers has no class for, by the `model_type` of their config.json.

Their published folders bring code. The code is not run: the classes are here, and the tokenizers are the library's.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from ..weights.json_files import read_json_object

_CLASSES = {
    "llada": ("llada", "LLaDAModelLM"),
    "lladamoe": ("llada_moe", "LLaDAMoEModelLM"),
    "mmada": ("llada", "MMadaModelLM"),
    "Dream": ("dream", "DreamModel"),
    "sdar": ("sdar", "SDARForCausalLM"),
    "sdar_moe": ("sdar", "SDARMoeForCausalLM"),
    "llada2_moe": ("llada2", "LLaDA2MoeModelLM"),
}
DIFFUSION_TYPES = tuple(_CLASSES)
"""LLaDA, LLaDA with mixtures of experts, and MMaDA; Dream, and DiffuCoder with its layers; SDAR and TraDo; LLaDA 2."""

BLOCK_TYPES = {"sdar": 0.9, "sdar_moe": 0.9, "llada2_moe": 0.95}
"""Models that write block after block, with the threshold of the examples on their pages."""


def configuration(path: str, *, local: bool = False) -> dict[str, Any]:
    """What is in the `config.json` of a model.

    Args:
        path: a folder, or a hub id.
        local: whether nothing may be downloaded.

    Raises:
        OSError: the configuration of the hub id cannot be read.
    """
    from transformers import PretrainedConfig

    if Path(path).is_dir():
        return read_json_object(Path(path) / "config.json")
    found: dict[str, Any] = PretrainedConfig.get_config_dict(path, local_files_only=local)[0]
    return found


def type_of(path: str, *, local: bool = False) -> str | None:
    """The `model_type` of a folder or a hub id if a class for it is here, and None otherwise.

    Args:
        path: a folder, or a hub id.
        local: whether nothing may be downloaded.

    Raises:
        OSError: the configuration of the hub id cannot be read.
    """
    config = configuration(path, local=local)
    found, made = config.get("model_type"), config.get("architectures") or []
    # Some published folders of mixtures of experts have the type of the models without.
    if found == "llada" and "LLaDAMoEModelLM" in made:
        return "lladamoe"
    return found if found in DIFFUSION_TYPES else None


def model_class(kind: str) -> Any:
    """The class of a type's models."""
    module, name = _CLASSES[kind]
    return getattr(import_module(f"{__package__}.{module}"), name)


def tokenizer_class(kind: str) -> Any:
    """The class of a type's tokenizers."""
    # The names of newer versions are others, and these are known to all supported versions.
    from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast

    return Qwen2TokenizerFast if kind in ("Dream", "sdar", "sdar_moe") else PreTrainedTokenizerFast


def block_size(path: str, kind: str) -> int:
    """Tokens of a block by a model's configuration, or as most models of the type have, if it is not on this machine.

    Args:
        path: a folder, or a hub id.
        kind: a key of `BLOCK_TYPES`.
    """
    source = model_class(kind).config_class
    try:
        return int(source.from_pretrained(path, local_files_only=True).block_size)
    except OSError:
        return int(source().block_size)


def check_block(path: str, kind: str | None, block: int | None, attention: str | None) -> None:
    """Check that a recipe says how long blocks are if, and only if, its model writes block after block.

    Args:
        path: a folder, or a hub id.
        kind: its type, see `type_of`.
        block: tokens of a block; None if the recipe does not say.
        attention: implementation of attention; None for the library's choice.

    Raises:
        ValueError: `block` is missing or not for this model, or the kernel of attention has no blocks.
    """
    if kind not in BLOCK_TYPES:
        if block is not None:
            raise ValueError(f"model.block is {block}, and in {path} each token sees all others; leave model.block out")
        return
    if block is None:
        size = block_size(path, kind)
        raise ValueError(
            f"{path} writes block after block; say how many tokens a block has, as in model.block={size} (the "
            "block_size of its config.json, or the size that models of its type have)"
        )
    if attention is not None and "flash" in attention:
        raise ValueError(
            f"model.attention is {attention}, which has no blocks; {path} writes block after block, so "
            "use sdpa or eager"
        )
