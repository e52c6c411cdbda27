"""Settings of a LoRA adapter, and the layers of a denoiser that it adapts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from .quantized import computes_in

__all__ = [
    "ATTENTION_PROJECTIONS",
    "EVERY_LAYER",
    "LoraSpec",
    "NoSuchLayer",
    "computing_dtype",
    "names_layer",
    "target_layers",
]


ATTENTION_PROJECTIONS = (
    *("to_q", "to_k", "to_v", "to_out.0", "to_out"),
    # Projections of the text in a block of two streams: most classes, and HiDream.
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("to_q_t", "to_k_t", "to_v_t", "to_out_t"),
    # FLUX.2 has queries, keys, values and the first layer of the MLP in one product.
    "to_qkv_mlp_proj",
    # Kandinsky 5 and 6.
    *("to_query", "to_key", "to_value", "attn.out_layer", "self_attention.out_layer", "cross_attention.out_layer"),
    *("av_cross_attention.out_layer", "va_cross_attention.out_layer"),
)
"""Endings of the names of attention's projections in the denoisers of diffusers."""


class NoSuchLayer(ValueError):
    """A LoRA names layers that the model does not have."""


EVERY_LAYER = ("all-linear",)
"""In the place of names of layers, all linear layers."""


@dataclass(frozen=True)
class LoraSpec:
    """A low-rank adapter `W + (alpha / rank)·B·A` on chosen linear layers (Hu et al. 2021, LoRA, eq. 3).

    Attributes:
        rank: inner dimension of A `[rank, in]` and B `[out, rank]`, at least 1.
        alpha: numerator of the scale, positive.
        targets: endings of the names of the linear layers to adapt, or whole names after `^`; None adapts all layers in
            `ATTENTION_PROJECTIONS` that the module has, and `EVERY_LAYER` all linear layers, by peft's name for them.
        init: "gaussian" draws A from N(0, 1/rank²), "default" is peft's Kaiming-uniform A. B is zero in both,
            so an untrained adapter changes nothing.
        dropout: probability in [0, 1), used in train mode only. With any value but 0, log-probs of rollout and
            training differ, and the ratio is not 1 at unchanged weights.
        compute: type in which A and B are multiplied. With "base" it is bfloat16 in a layer of bfloat16, as under
            autocast, and float32 in every other layer: in float16, small gradients would be 0 without a scaled loss.
            With "float32" it is float32 in every layer. Both train float32 numbers.
    """

    rank: int = 32
    alpha: float = 64
    targets: tuple[str, ...] | None = None
    init: Literal["gaussian", "default"] = "gaussian"
    dropout: float = 0.0
    compute: Literal["base", "float32"] = "base"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LoraSpec.rank is {self.rank}; use 1 or more (32 is usual)")
        if self.alpha <= 0:
            raise ValueError(f"LoraSpec.alpha is {self.alpha}; use a positive number (twice the rank is usual)")
        if isinstance(self.targets, str):
            raise ValueError(f"LoraSpec.targets is the string {self.targets!r}; write ({self.targets!r},)")
        if self.targets is not None and not self.targets:
            raise ValueError("LoraSpec.targets is empty; name at least one layer, or write None for attention")
        if self.init not in ("gaussian", "default"):
            raise ValueError(f"LoraSpec.init is {self.init!r}; use 'gaussian' or 'default'")
        if self.compute not in ("base", "float32"):
            raise ValueError(f"LoraSpec.compute is {self.compute!r}; use 'base' or 'float32'")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LoraSpec.dropout is {self.dropout}; use a number in [0, 1), best 0")


def target_layers(key: str, module: nn.Module, spec: LoraSpec) -> list[str]:
    """Full names of the linear layers to adapt. Endings alone could also match convolutions and embeddings.

    Args:
        key: the module's component name, for messages.
        module: the denoiser.
        spec: has the endings to look for.

    Raises:
        NoSuchLayer: an ending in `spec.targets` matches no layer, or no default ending matches a layer.
        ValueError: the module already has an adapter, or takes no adapter.
    """
    label = f"{key} ({type(module).__name__})"
    if not hasattr(module, "add_adapter"):
        raise ValueError(
            f"{label} takes no adapter, because diffusers has no LoRA for this class; write model.train: full (in a "
            "program of your own: TrainedWeights.full)"
        )
    if getattr(module, "peft_config", None):
        raise ValueError(
            f"{label} already has the adapters {', '.join(module.peft_config)}; keep their effect with "
            "pipe.fuse_lora(), then remove them with pipe.unload_lora_weights()"
        )
    linear = [name for name, part in module.named_modules() if is_linear(part)]
    if spec.targets == EVERY_LAYER and linear:
        return linear
    wanted = spec.targets or ATTENTION_PROJECTIONS
    hits = {target: [name for name in linear if names_layer(target, name)] for target in wanted}
    absent = [target for target, names in hits.items() if not names]
    if absent and (spec.targets is not None or len(absent) == len(wanted)):
        endings = sorted({_ending(name) for name in linear})
        missing = (
            "as the projections of attention usually are"
            if spec.targets is None
            else _first([name.removeprefix("^") for name in absent])
        )
        raise NoSuchLayer(
            f"{label} has no linear layer named {missing}; model.lora.targets can name "
            f"{', '.join(endings) or 'nothing: it has no linear layer'}. If the layers come from model.lora.start, use "
            "a LoRA of this model"
        )
    chosen = {name for names in hits.values() for name in names}
    return [name for name in linear if name in chosen]


def names_layer(target: str, name: str) -> bool:
    """Whether a target names a layer: by the end of its name, or with `^` in front by its whole name."""
    return name == target[1:] if target.startswith("^") else f".{name}".endswith(f".{target}")


def _first(names: list[str], most: int = 3) -> str:
    """The first names of a list; a LoRA of another model lacks hundreds."""
    more = len(names) - most
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:most])} and {more} more"


def is_linear(part: nn.Module) -> bool:
    """Whether a module is a linear layer: `nn.Linear`, or the layer of GPT-2, whose weight is [in, out]."""
    return isinstance(part, nn.Linear) or is_transposed(part)


def is_transposed(part: nn.Module) -> bool:
    """Whether a module is the linear layer of GPT-2, `Conv1D` of transformers."""
    # A model of transformers has imported the class; without one, the library need not be imported.
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and isinstance(part, library.Conv1D)


def computing_dtype(layer: nn.Module, spec: LoraSpec) -> torch.dtype:
    """The type in which an adapted layer multiplies A and B.

    Args:
        layer: a layer of peft, with the adapted layer as `base_layer`.
        spec: says in which type the adapter computes.

    Raises:
        ValueError: the layer is no layer with a weight, such as the experts of a mixture.
    """
    base = layer.get_base_layer()  # type: ignore[operator]
    if not isinstance(getattr(base, "weight", None), torch.Tensor):
        raise ValueError(
            f"peft would adapt a {type(base).__name__} because of the names of its layers, and a LoRA of it is not "
            "supported; name other layers with model.lora.targets"
        )
    dtype = computes_in(base)
    return dtype if spec.compute == "base" and dtype == torch.bfloat16 else torch.float32


def _ending(name: str) -> str:
    """The last part of a layer's name; if this part is an index, with the part before it."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
