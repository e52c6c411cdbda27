"""The numbers of an adapter in a module, by peft.

peft imports the models of transformers, which takes seconds. So it is imported by the first call, and a recipe is read
and planned without it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

__all__ = ["adapter_state", "set_adapter_state"]


def adapter_state(module: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Name -> tensor of an adapter, without the name of the adapter in the names."""
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(module, adapter_name=adapter)
    return found


def set_adapter_state(module: nn.Module, adapter: str, state: Mapping[str, Tensor]) -> None:
    """Copy tensors, named as by `adapter_state`, into an adapter."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(module, dict(state), adapter_name=adapter)
