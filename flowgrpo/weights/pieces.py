"""Tensors that are cut over processes (`DTensor`): the whole of one, and a piece like another.

The module of `DTensor` loads for a second, and only a run with several processes has such tensors. So nothing here
imports the module before the first tensor of this kind is met.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["cut_as", "cut_optimizer_state", "is_cut", "whole", "wholes"]


def is_cut(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a tensor of which each process holds a piece."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the CPU.

    If the tensor is sharded, all processes must call this function. The first process gets the whole tensor, and the
    others get an empty tensor.
    """
    if not is_cut(tensor):
        return tensor.detach().to("cpu", copy=True)
    found = tensor.detach().full_tensor()
    return found.cpu() if tensor.device_mesh.get_rank() == 0 else torch.empty(0)


def wholes(state: Any) -> Any:
    """A copy of a nest of dicts and lists, in which `whole` is applied to each sharded tensor."""
    return tree_map_only(is_cut, whole, state)


def cut_as(like: Tensor, tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, cut like `like` and on its device; the tensor itself if `like` is not cut."""
    if not is_cut(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # There is no source rank, for which every process would have to wait: all processes have read the same file.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def cut_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, in which each tensor with the shape of its parameter is cut like the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def cut(number: int, value: Any) -> Any:
        like = parameters[number]
        return cut_as(like, value) if isinstance(value, Tensor) and value.shape == like.shape else value

    entries = {n: {key: cut(n, value) for key, value in entry.items()} for n, entry in state["state"].items()}
    return {**state, "state": entries}
