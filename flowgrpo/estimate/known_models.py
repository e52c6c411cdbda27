"""Shapes of language models of the hub, so that they have an estimate before they are downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..text.diffusion_models import model_class, type_of

__all__ = [
    "KNOWN_DIFFUSION_MODELS", "KNOWN_LANGUAGE_MODELS", "known_config", "known_diffusion_config", "masked_shapes_of",
    "shapes_of",
]  # fmt: skip

_QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
_QWEN3 = {
    "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True}


def _sizes(width: int, layers: int, heads: int, inner: int) -> dict[str, int]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
    }  # fmt: skip


KNOWN_LANGUAGE_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {**_QWEN2, **_sizes(896, 24, 14, 4864)},
    "Qwen/Qwen2.5-1.5B": {**_QWEN2, **_sizes(1536, 28, 12, 8960)},
    "Qwen/Qwen2.5-3B": {**_QWEN2, **_sizes(2048, 36, 16, 11_008)},
    "Qwen/Qwen2.5-7B": {
        **_QWEN2, **_sizes(3584, 28, 28, 18_944), "num_key_value_heads": 4, "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-0.6B": {**_QWEN3, **_sizes(1024, 28, 16, 3072)},
    "Qwen/Qwen3-1.7B": {**_QWEN3, **_sizes(2048, 28, 16, 6144)},
    "Qwen/Qwen3-4B": {**_QWEN3, **_sizes(2560, 36, 32, 9728)},
    "Qwen/Qwen3-8B": {**_QWEN3, **_sizes(4096, 36, 32, 12_288), "tie_word_embeddings": False},
    "meta-llama/Llama-3.2-1B": {**_LLAMA, **_sizes(2048, 16, 32, 8192)},
    "meta-llama/Llama-3.2-3B": {**_LLAMA, **_sizes(3072, 28, 24, 8192)},
    "meta-llama/Llama-3.1-8B": {**_LLAMA, **_sizes(4096, 32, 32, 14_336), "tie_word_embeddings": False},
}  # fmt: skip
"""Configurations by the id of the base model; models of the same name with `-Instruct` or `-Base` have these too."""


_LLADA = {
    "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12_288, "vocab_size": 126_464,
}  # fmt: skip
_DREAM = {**_sizes(3584, 28, 28, 18_944), "num_key_value_heads": 4, "vocab_size": 152_064}
_SDAR = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
_SDAR_4B = {**_SDAR, **_sizes(2560, 36, 32, 9728)}
_SDAR_8B = {**_SDAR, **_sizes(4096, 36, 32, 12_288)}
KNOWN_DIFFUSION_MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "GSAI-ML/LLaDA-8B": ("llada", _LLADA),
    "GSAI-ML/LLaDA-1.5": ("llada", _LLADA),
    "Gen-Verse/MMaDA-8B": ("mmada", {**_LLADA, "vocab_size": 134_656}),
    "inclusionAI/LLaDA-MoE-7B-A1B": ("lladamoe", {"rope_theta": 50_000.0}),
    "Dream-org/Dream-v0": ("Dream", _DREAM),
    "Dream-org/Dream-Coder-v0": ("Dream", _DREAM),
    "apple/DiffuCoder-7B": ("Dream", _DREAM),
    "inclusionAI/LLaDA2.0-mini": ("llada2_moe", {}),
    "JetLM/SDAR-4B": ("sdar", _SDAR_4B),
    "JetLM/SDAR-8B": ("sdar", _SDAR_8B),
    "Gen-Verse/TraDo-4B": ("sdar", _SDAR_4B),
    "Gen-Verse/TraDo-8B": ("sdar", _SDAR_8B),
}
"""Types and configurations by the id of the base model, without what follows it, such as `-Instruct` or `-Base-7B`."""


def known_diffusion_config(path: str) -> Any | None:
    """The configuration of a known diffusion model of the hub; None for any other."""
    base = re.sub(r"(-(Base|Instruct|Chat|Thinking|TD|MixCoT|cpGRPO|CAP|preview|7B|b\d+))*$", "", path)
    kind, entries = KNOWN_DIFFUSION_MODELS.get(base) or KNOWN_DIFFUSION_MODELS.get(f"{base}-7B") or (None, {})
    return None if kind is None else model_class(kind).config_class(**entries)


def known_config(path: str) -> Any | None:
    """The configuration of a known model of the hub; None for any other."""
    from transformers import AutoConfig

    entries = KNOWN_LANGUAGE_MODELS.get(path.removesuffix("-Instruct").removesuffix("-Base"))
    if entries is None:
        return None
    rest = dict(entries)
    return AutoConfig.for_model(rest.pop("model_type"), **rest)


def shapes_of(path: str) -> Any:
    """The configuration of a language model; no weight is read, and nothing is downloaded.

    Args:
        path: a folder of transformers, a hub id whose configuration is on this machine, or the id of a known model.

    Raises:
        ValueError: the configuration is not on this machine, and the model is not a known one.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except OSError as error:
        config = known_config(path)
        if config is None:
            raise _not_here(path, KNOWN_LANGUAGE_MODELS) from error
        return config


def masked_shapes_of(path: str) -> Any:
    """The configuration of a masked language model; no weight is read, and nothing is downloaded.

    Args:
        path: a folder, a hub id whose configuration is on this machine, or the id of a known model.

    Raises:
        ValueError: the configuration is not on this machine, and the model is not a known one.
    """
    known = known_diffusion_config(path)
    if known is not None:
        return known
    from transformers import AutoConfig

    try:
        kind = type_of(path, local=True)
        source = AutoConfig if kind is None else model_class(kind).config_class
        return source.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except OSError as error:
        raise _not_here(path, KNOWN_DIFFUSION_MODELS) from error


def _not_here(path: str, known: Iterable[str]) -> ValueError:
    return ValueError(
        f"the configuration of {path} is not on this machine; name a folder with the model, or download it first. "
        f"Without files the shapes are known of {', '.join(known)}"
    )
