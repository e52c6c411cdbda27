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
        change = b @ a * layer.scaling[adapter]
        total = total + (change.T if layer.fan_in_fan_out else change)
    return total.to(weight.dtype)


def refuse_shared(module: nn.Module) -> None:
    """Refuse a module in which two adapted layers have one weight, to which their adapters cannot both be added.

    Raises:
        ValueError: there are two layers of this kind, as in Zamba2.
    """
    known: dict[int, str] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, BaseTunerLayer):
            other = known.setdefault(id(layer.get_base_layer().weight), name)
            if other != name:
                raise ValueError(
                    f"{other} and {name} share their weights, and each has a LoRA of its own, so the LoRAs cannot be "
                    "added into the weights; use the LoRA as it is, or name other layers with model.lora.targets"
                )


def merge_adapters(module: Any) -> None:
    """Add the active adapters of a module into its weights, and take all adapters out of it.

    Raises:
        ValueError: as in `refuse_shared`.
    """
    refuse_shared(module)
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
