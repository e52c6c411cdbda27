"""The numbers of an adapter in a module, by peft.

peft imports the models of transformers, which takes seconds. So it is imported by the first call, and a recipe is read
and planned without it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["adapter_state", "set_adapter_state"]


def adapter_state(module: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Name -> tensor of an adapter, without the name of the adapter in the names."""
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(module, adapter_name=adapter)
    return found


@torch.no_grad()
def set_adapter_state(module: nn.Module, adapter: str, state: Mapping[str, Tensor]) -> None:
    """Copy tensors, named as by `adapter_state`, into an adapter.

    peft's own function takes the names for names in files of transformers. It renames them as it renames the weights of
    some models, and leaves out without a word what it does not find afterwards.

    Raises:
        KeyError: the adapter has no such tensor.
    """
    own = {
        name.replace(f".{adapter}", ""): parameter
        for name, parameter in module.named_parameters()
        if ".lora_" in name and f".{adapter}" in name
    }
    for name, tensor in state.items():
        own[name].copy_(tensor)
