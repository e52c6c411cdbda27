"""What accelerate's launcher asks of the weights: shards, by FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from ..configs.schema import AnyRecipe, Recipe
from ..pipelines.sharding import Shards


def sharding_of(recipe: AnyRecipe, accelerator: Accelerator) -> Callable[[dict[str, nn.Module]], Shards] | None:
    """What cuts full weights into shards, if the launcher asks for it (`--use_fsdp`); a LoRA stays whole.

    On CPUs accelerate does not pass on what it was asked for, so the environment that its launcher sets is read.

    Raises:
        ValueError: the launcher's options or the recipe do not fit; says which to change.
    """
    if not parse_flag_from_env("ACCELERATE_USE_FSDP") or recipe.model.train == "lora" or accelerator.num_processes == 1:
        return None
    plugin = getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
    if not isinstance(recipe, Recipe):
        raise ValueError(
            "sharded full weights are there for pipelines of diffusers; train a language model with model.train lora, "
            "or launch with --multi_gpu in place of --use_fsdp"
        )
    faults = [
        (
            accelerator.mixed_precision != "no",
            "FSDP would round what goes into the denoiser, its timesteps too; launch with --mixed_precision no",
        ),
        (plugin.fsdp_version != 2, "FSDP version 1 is not supported; launch with --fsdp_version 2"),
        (
            isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "shards are not kept on the CPU; launch with --fsdp_offload_params false",
        ),
        (
            bool(plugin.activation_checkpointing),
            "set model.gradient_checkpointing in the recipe in place of --fsdp_activation_checkpointing",
        ),
        (recipe.model.compile, "sharded blocks are not compiled; turn model.compile off"),
    ]
    for found, message in faults:
        if found:
            raise ValueError(message)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    return partial(Shards, mesh=mesh, keep=not plugin.reshard_after_forward)
