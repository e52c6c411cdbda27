"""The LoRA layers of modules: put into them, switched, scaled."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .lora import LoraSpec, computing_dtype, is_transposed
from .lora_layer import add_in_place

__all__ = ["ADAPTER", "adapter_layers", "choose_adapter", "put_adapters", "scale_adapters", "switch_adapters"]

ADAPTER = "default"
"""The name that the trained adapter has in peft."""


def put_adapters(
    modules: Mapping[str, nn.Module], targets: Mapping[str, list[str]], spec: LoraSpec, seed: int, name: str = ADAPTER
) -> None:
    """Add one trainable LoRA adapter to each module, whose own weights must be frozen. The modules compute with it.

    Args:
        modules: component name -> module without an adapter of this name.
        targets: component name -> the layers to adapt, from `lora.target_layers`.
        spec: rank, scale, and the type of the arithmetic.
        seed: of the initial A matrices. Global random state is neither read nor changed.
        name: of the adapter in peft. Other adapters of the modules are frozen.
    """
    # Only the CPU generator is seeded: peft draws A on the CPU before it moves A. torch.manual_seed would also seed
    # every accelerator, and fork_rng(devices=[]) does not restore accelerators.
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        for key, module in modules.items():
            config = LoraConfig(
                r=spec.rank,
                lora_alpha=spec.alpha,
                target_modules=targets[key],
                # peft takes a name for an ending too: FLUX has a layer `proj_out`, and one in each single block.
                exclude_modules=_only_by_ending(module, targets[key]) or None,
                init_lora_weights="gaussian" if spec.init == "gaussian" else True,
                lora_dropout=spec.dropout,
                fan_in_fan_out=all(is_transposed(module.get_submodule(name)) for name in targets[key]),
            )
            _adapt(module, config, name)
    for layer in adapter_layers(modules):
        add_in_place(layer)
        dtype = computing_dtype(layer, spec)
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def _only_by_ending(module: nn.Module, targets: list[str]) -> list[str]:
    """Names of layers that end with a target, and are none."""
    chosen = set(targets)
    short = [f".{name}" for name in targets if not any(part.isdigit() for part in name.split("."))]
    return [name for name, _ in module.named_modules() if name not in chosen and name.endswith(tuple(short))]


def _adapt(module: Any, config: LoraConfig, name: str) -> None:
    """Do what `add_adapter` of diffusers and transformers does.

    The method of transformers may also ask for a version of peft that is not out yet: transformers 5.24 asks for 0.22.
    """
    module._hf_peft_config_loaded = True
    with warnings.catch_warnings():
        # A teacher stands beside the trained adapter on purpose.
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        inject_adapter_in_model(config, module, name)


def adapter_layers(modules: Mapping[str, nn.Module]) -> Iterator[Any]:
    """The layers with an adapter."""
    for module in modules.values():
        for layer in module.modules():
            if isinstance(layer, BaseTunerLayer):
                yield layer


def switch_adapters(modules: Mapping[str, nn.Module], on: bool) -> None:
    """Let the layers compute with their adapters, or without them.

    `disable_adapters` and `enable_adapters` of diffusers do the same, but look up the version of peft at each call.
    """
    for layer in adapter_layers(modules):
        layer.enable_adapters(on)


def choose_adapter(modules: Mapping[str, nn.Module], name: str) -> None:
    """Let the modules compute with the adapter of this name. Adapters of other names are frozen, and have no effect."""
    for layer in adapter_layers(modules):
        layer.set_adapter(name)


def scale_adapters(modules: Mapping[str, nn.Module], scale: float) -> None:
    """Multiply the effect of the adapters by a factor, as `set_adapters` of plain diffusers does; 1 is as trained.

    Raises:
        ValueError: the factor is not finite, or there is no adapter.
    """
    layers = list(adapter_layers(modules))
    if not math.isfinite(scale):
        raise ValueError(f"the scale of the LoRA is {scale}; give a finite number, 1 is as trained")
    if not layers:
        raise ValueError("this model has no LoRA whose scale could change; leave the scale out")
    for layer in layers:
        layer.set_scale(ADAPTER, scale)
