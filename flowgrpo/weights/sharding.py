"""Full weights cut into shards, one a process, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

A block's weights are gathered when it is evaluated, and dropped after. Optimizer and averages work on the shards.
Files have whole tensors, the same as without shards, so any number of processes reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from .collective import Lockstep, teller

__all__ = ["Shards", "cut_as", "cut_optimizer_state", "repeated_blocks", "whole", "wholes"]


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Blocks of the classes that the model names, or else what its lists of several modules hold."""
    named = set(getattr(module, "_repeated_blocks", None) or ())
    found = [part for part in module.modules() if type(part).__name__ in named]
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) > 1]
    return found or [block for stack in lists for block in stack]


class Shards:
    """Modules whose weights are shared out to the processes of a mesh.

    Gradients are added over processes in the backward pass, not averaged: losses are divided by counts of the whole
    optimizer step. Call `steps.backward` for it.

    Args:
        modules: component name -> denoiser, with the weights in place; all trained. Shards are in float32. Weights that
            come in half precision are rounded to it again whenever they are gathered. Parameters of a block itself, not
            of a module within it, are rounded too where the class keeps them in float32.
        mesh: of one dimension, with all processes.
        keep: keep what an evaluation with gradients has gathered for its backward pass.

    Attributes:
        steps: keeps the processes in step.
    """

    def __init__(self, modules: Mapping[str, nn.Module], mesh: DeviceMesh, keep: bool = False) -> None:
        self._modules, self._kinds = dict(modules), {name: type(module) for name, module in modules.items()}
        self._dtypes = {
            name: {key: parameter.dtype for key, parameter in module.named_parameters()}
            for name, module in modules.items()
        }
        for module in modules.values():
            dtype = _computing_dtype(module)
            exact = [] if dtype is torch.float32 else _in_float32(module)
            # What goes into a block stays as it is: a timestep would be rounded too.
            half = {"param_dtype": dtype, "reduce_dtype": torch.float32, "cast_forward_inputs": False}
            rounded = MixedPrecisionPolicy(**({} if dtype is torch.float32 else half))
            for parameter in module.parameters():
                parameter.data = parameter.data.float()
            for part in [*exact, *reversed(repeated_blocks(module)), module]:
                part.register_forward_hook(_of_their_own)
                policy = MixedPrecisionPolicy() if part in exact else rounded
                fully_shard(part, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy)
            _say_dtype(module, dtype)
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    # Sums alone: gloo has no other reduction.
                    part.set_force_sum_reduction_for_comms(True)
                    part.set_gradient_divide_factor(1.0)
        # What an evaluation leaves gathered would outlast an exchange of the weights.
        self.steps = Lockstep(list(modules.values()), teller(), self._release if keep else None)

    def _release(self) -> None:
        for module in self._modules.values():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def whole_modules(self) -> dict[str, nn.Module]:
        """The modules as they were before they were cut, with the present weights, on the CPU of the first process.

        All processes must call it; the others get none.
        """
        self.steps.meet()
        found = {}
        for name, module in self._modules.items():
            dtypes = self._dtypes[name]
            state = {key: whole(value).to(dtypes.get(key, value.dtype)) for key, value in module.state_dict().items()}
            if dist.get_rank() == 0:
                with torch.device("meta"):
                    plain: Any = self._kinds[name].from_config(module.config)  # type: ignore[attr-defined]
                plain.load_state_dict(state, assign=True)
                found[name] = plain
        return found


def _computing_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of most numbers of a module."""
    numbers = Counter[torch.dtype]()
    for parameter in module.parameters():
        numbers[parameter.dtype] += parameter.numel()
    return max(numbers, key=lambda dtype: numbers[dtype])


def _in_float32(module: nn.Module) -> list[nn.Module]:
    """The largest modules within a half-precision module that its class keeps in float32 as a whole."""
    found: list[nn.Module] = []
    for child in module.children():
        dtypes = {parameter.dtype for parameter in child.parameters()}
        if dtypes == {torch.float32}:
            found.append(child)
        elif torch.float32 in dtypes:
            found += _in_float32(child)
    return found


def _say_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Let `module.dtype` be the format in which it computes, which is what a pipeline casts its states to."""
    kind: Any = type(module)

    def told(self: Any) -> torch.dtype:
        found: torch.dtype = self.__dict__["_computes_in"]
        return found

    module.__dict__["_computes_in"] = dtype
    kind.dtype = property(told)


def _of_their_own(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Outputs without views: what a pipeline writes into one would lose the hook that gathers weights for backward."""
    return tree_map_only(Tensor, lambda made: made.clone() if made._is_view() else made, outputs)


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the CPU.

    Of a sharded one all processes must call it: the first gets it whole, the others an empty tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    found = tensor.detach().full_tensor()
    return found.cpu() if tensor.device_mesh.get_rank() == 0 else torch.empty(0)


def wholes(state: Any) -> Any:
    """A nest of dicts and lists with each sharded tensor in it `whole`."""
    return tree_map_only(DTensor, whole, state)


def cut_as(like: Tensor, tensor: Tensor) -> Tensor:
    """This process's shard of a whole tensor, cut as `like` is and on its device; itself if `like` is whole."""
    if not isinstance(like, DTensor):
        return tensor
    # Without a source, which every process would have to wait for: all have read the same file.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def cut_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with each tensor that has the shape of its parameter cut as that is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def cut(number: int, value: Any) -> Any:
        like = parameters[number]
        return cut_as(like, value) if isinstance(value, Tensor) and value.shape == like.shape else value

    entries = {n: {key: cut(n, value) for key, value in entry.items()} for n, entry in state["state"].items()}
    return {**state, "state": entries}
