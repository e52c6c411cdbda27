"""What the launcher of accelerate asks for: weights in shards (FSDP2), or the optimizer in parts (DeepSpeed)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import nn

from ...configs.schema import AnyRecipe, Recipe
from ...weights.trained import TrainedWeights
from ..recipe_launches import check_shards
from ..updating import Optimizer, Stepper
from .context_groups import context_of
from .processes import Processes
from .zero import ZeroOptimizer

if TYPE_CHECKING:
    from ...weights.sharding import Shards

OFFLOADED = ("optimizer", "param")
# These leave the numbers as they are. `round_robin_gradients`, for one, does not: DeepSpeed then puts weights and
# moments that are loaded into the places of other parameters.
PASSED = (
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "overlap_comm", "reduce_bucket_size",
    "reduce_scatter", "stage",
)  # fmt: skip


def load_whole_models() -> None:
    """Have transformers load its models whole on every process, before it is asked for any.

    accelerate's launcher asks with `--use_fsdp` for models whose weights are on one process of each machine only,
    because FSDP would hand them out. A run shards only its denoiser, after loading. With transformers 4, the text
    encoders of the other processes would keep memory that nobody has written to.
    """
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def sharding_of(recipe: AnyRecipe, accelerator: Accelerator) -> Callable[[dict[str, nn.Module]], Shards] | None:
    """A function that cuts the weights of a denoiser into shards, if the launcher asks for it (`--use_fsdp`).

    With a LoRA, it cuts the frozen weights. It is None if the launcher does not ask, or for a LoRA of a language model.

    On CPUs accelerate does not pass on its options, so the environment variables of its launcher are read.

    Raises:
        ValueError: the launcher's options or the recipe do not fit; the message says what to change.
    """
    whole = recipe.model.train == "lora" and not isinstance(recipe, Recipe)
    if not parse_flag_from_env("ACCELERATE_USE_FSDP") or whole or accelerator.num_processes == 1:
        return None
    # Imported only here: the modules of sharding load for more than a second, and few runs need them.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy

    from ...weights.sharding import Shards

    plugin = getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin()
    check_shards(recipe)
    faults = [
        (
            accelerator.mixed_precision != "no",
            "FSDP would round the inputs of the denoiser, timesteps included; launch with --mixed_precision no",
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
    ]
    _refuse(faults)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    return partial(Shards, mesh=mesh, keep=not plugin.reshard_after_forward)


def zero_of(recipe: AnyRecipe, accelerator: Accelerator) -> dict[str, Any] | None:
    """The section `zero_optimization` for DeepSpeed, if the launcher asks for DeepSpeed (`--use_deepspeed`).

    Raises:
        ValueError: the launcher's options do not fit; the message says which to change.
    """
    if not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED") or accelerator.num_processes == 1:
        return None
    plugin = getattr(accelerator.state, "deepspeed_plugin", None) or DeepSpeedPlugin()
    config, norm = plugin.deepspeed_config, recipe.optimizer.max_grad_norm
    zero = {key: value for key, value in config["zero_optimization"].items() if value != "auto"}
    sections = [name for name in ("optimizer", "scheduler") if name in config]
    unknown = sorted(key for key, value in zero.items() if value and key not in PASSED and not _of_others(key))
    _refuse(
        [
            (
                zero.get("stage") != 2,
                f"ZeRO stage {zero.get('stage')} is not supported; launch with --zero_stage 2, or, for weights in "
                "shards, with --use_fsdp --fsdp_version 2 in place of --use_deepspeed",
            ),
            (
                bool(unknown),
                f"{', '.join(unknown)} in the section zero_optimization of DeepSpeed's configuration may change the "
                f"numbers of a run; take it out. These may stay: {', '.join(PASSED)}",
            ),
            (
                any((zero.get(f"offload_{what}") or {}).get("device", "none") != "none" for what in OFFLOADED),
                "nothing is offloaded to the CPU or to disks; launch with --offload_optimizer_device none "
                "--offload_param_device none",
            ),
            (
                accelerator.mixed_precision != "no",
                "the trained weights are kept in float32, because another format would lose small updates; launch with "
                "--mixed_precision no, and set model.dtype for the frozen weights",
            ),
            (
                config.get("gradient_accumulation_steps", "auto") not in ("auto", 1),
                "the recipe decides how much an optimizer step takes (optimizer.updates, rollout.batch); launch with "
                "--gradient_accumulation_steps 1",
            ),
            (
                config.get("gradient_clipping", "auto") not in ("auto", norm),
                f"--gradient_clipping {config.get('gradient_clipping')} is not optimizer.max_grad_norm, {norm}, and "
                "the recipe's value counts; leave --gradient_clipping out",
            ),
            (
                recipe.optimizer.type != "adamw",
                f"the averages of optimizer.type {recipe.optimizer.type} are not shared out among processes; use "
                "optimizer.type adamw, or launch with --multi_gpu in place of --use_deepspeed",
            ),
            (
                context_of(recipe) > 1,
                "model.context_parallel does not run with DeepSpeed; launch with --multi_gpu or --use_fsdp in place of "
                "--use_deepspeed",
            ),
            (
                bool(sections),
                f"DeepSpeed's configuration has the section {' and '.join(sections)}, and the recipe (optimizer) sets "
                "AdamW and its schedule; take the section out",
            ),
        ]
    )
    return {key: value for key, value in zero.items() if key in PASSED}


def _of_others(key: str) -> bool:
    """Whether a key of `zero_optimization` has no meaning for stage 2 without offloading."""
    return key.startswith(("offload_", "stage3_")) or key == "sub_group_size"


def notes_on_launch(recipe: AnyRecipe, accelerator: Accelerator) -> list[str]:
    """What the user should know about the launcher's options that change nothing; empty if nothing.

    Call it after `sharding_of` and `zero_of`, which refuse some of these options.
    """
    precision, steps = accelerator.mixed_precision, accelerator.gradient_accumulation_steps
    sharded = parse_flag_from_env("ACCELERATE_USE_FSDP") and accelerator.num_processes > 1
    idle = [
        (
            sharded and recipe.model.train == "lora" and not isinstance(recipe, Recipe),
            "--use_fsdp",
            "FSDP2 divides denoisers, and each process holds the whole language model of a LoRA",
        ),
        (precision != "no", f"--mixed_precision {precision}", "model.dtype is the format in which the model computes"),
        (
            steps != 1,
            f"--gradient_accumulation_steps {steps}",
            "rollout.prompts and optimizer.updates say how many prompts make an optimizer step",
        ),
    ]
    return [f"{option} changes nothing here: {why}" for found, option, why in idle if found]


def optimizer_of(recipe: AnyRecipe, accelerator: Accelerator, weights: TrainedWeights, processes: Processes) -> Stepper:
    """The optimizer of the trained weights, as the launcher asks; raises as `zero_of`."""
    zero = zero_of(recipe, accelerator)
    return Optimizer(recipe, weights, processes) if zero is None else ZeroOptimizer(recipe, weights, processes, zero)


def _refuse(faults: Sequence[tuple[bool, str]]) -> None:
    for found, message in faults:
        if found:
            raise ValueError(message)
