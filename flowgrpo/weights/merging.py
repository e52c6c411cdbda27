"""A LoRA that is added into the weights of its base model."""

from __future__ import annotations

from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn


def merged_weight(layer: Any) -> Tensor:
    """W + Σ (alpha / rank)·B·A of an adapted linear layer and its active adapters, in the type of W.

    Args:
        layer: a layer of peft, with the adapted layer as `base_layer`.
    """
    weight: Tensor = layer.get_base_layer().weight.detach()
    if layer.disable_adapters:
        return weight
    total = weight
    for adapter in layer.active_adapters:
        # In float32, because small steps would vanish in sums of bfloat16.
        a, b = (of[adapter].weight.detach().float() for of in (layer.lora_A, layer.lora_B))
        total = total + b @ a * layer.scaling[adapter]
    return total.to(weight.dtype)


def merge_adapters(module: Any) -> None:
    """Add the active adapters of a module into its weights, and take all adapters out of it."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            base: Any = layer.get_base_layer()
            base.weight.data = merged_weight(layer)
            parent, _, child = name.rpartition(".")
            holder: nn.Module = module.get_submodule(parent)
            setattr(holder, child, base)
    # With these, `save_pretrained` would look for adapters.
    module._hf_peft_config_loaded = False
    del module.peft_config
