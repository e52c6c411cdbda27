"""Weights that are cut into shards, one for each process, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

The weights of a block are gathered when the block is evaluated, and dropped afterwards. Of full weights, optimizer and
averages work on the shards. Of a model with a LoRA, the frozen weights are cut, and the adapter is whole on each
process. Files have whole tensors, as without shards, so any number of processes can read them.
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
from torch.utils._pytree import tree_map_only

from .blocks import repeated_blocks
from .collective import Lockstep, teller
from .pieces import whole

__all__ = ["Shards"]


class Shards:
    """Modules whose weights are distributed over the processes of a mesh.

    The backward pass adds gradients over processes and does not average them, because losses are divided by counts of
    the whole optimizer step. Call `steps.backward` for a backward pass.

    Args:
        modules: component name -> denoiser, with the weights in place. If all weights are trained, shards are in
            float32. Weights that come in half precision are rounded to it again whenever they are gathered. Parameters
            of a block itself, not of a module within it, are rounded too where the class keeps them in float32. If only
            an adapter is trained, the other weights are cut as they are.
        mesh: of one dimension, with all processes.
        keep: whether an evaluation with gradients keeps the gathered weights for its backward pass.

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
            adapter = _adapter_of(module)
            dtype = _computing_dtype(module)
            exact = [] if adapter or dtype is torch.float32 else _in_float32(module)
            # What goes into a block stays as it is: a timestep would be rounded too.
            half = {"param_dtype": dtype, "reduce_dtype": torch.float32, "cast_forward_inputs": False}
            rounded = MixedPrecisionPolicy(**({} if adapter or dtype is torch.float32 else half))
            for parameter in module.parameters():
                if parameter in adapter:
                    parameter.data = parameter.data.to(mesh.device_type)
                elif not adapter:
                    parameter.data = parameter.data.float()
            for part in [*exact, *reversed(repeated_blocks(module)), module]:
                part.register_forward_hook(_of_their_own)
                policy = MixedPrecisionPolicy() if part in exact else rounded
                fully_shard(part, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy, ignored_params=adapter)
            if not adapter:
                _say_dtype(module, dtype)
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    # Gloo can only add, so there must be no other reduction.
                    part.set_force_sum_reduction_for_comms(True)
                    part.set_gradient_divide_factor(1.0)
        # Weights that an evaluation leaves gathered would stay unchanged during an exchange of the weights.
        self.steps = Lockstep(list(modules.values()), teller(), self._release if keep else None)

    def _release(self) -> None:
        for module in self._modules.values():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def whole_modules(self) -> dict[str, nn.Module]:
        """Whole modules of the original classes with the current weights, on the CPU of the first process.

        All processes must call this method. The other processes get an empty dict.
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


def _adapter_of(module: nn.Module) -> set[nn.Parameter]:
    """The trained parameters of a module whose other parameters are frozen; empty if all are trained."""
    trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
    return trained if len(trained) < len(list(module.parameters())) else set()


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
    """The outputs with a copy of each view. A pipeline that writes into a view would remove the hook for backward."""
    return tree_map_only(Tensor, lambda made: made.clone() if made._is_view() else made, outputs)
