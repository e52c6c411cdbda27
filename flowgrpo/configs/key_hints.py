"""Where a key belongs that a recipe does not have: at another place, or under another name."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from ..parts.choice import owners
from .schema import SCHEMAS

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "lr": ("optimizer.learning_rate",),
    "lr_scheduler": ("optimizer.schedule",),
    "lr_scheduler_type": ("optimizer.schedule",),
    "scheduler": ("optimizer.schedule",),
    "warmup_steps": ("optimizer.warmup",),
    "adam_beta1": ("optimizer.betas",),
    "adam_beta2": ("optimizer.betas",),
    "adam_epsilon": ("optimizer.eps",),
    "adam_weight_decay": ("optimizer.weight_decay",),
    "wd": ("optimizer.weight_decay",),
    "grad_clip": ("optimizer.max_grad_norm",),
    "clip_grad": ("optimizer.max_grad_norm",),
    "ema_decay": ("optimizer.ema.decay",),
    "use_ema": ("optimizer.ema.decay",),
    "num_inner_epochs": ("optimizer.epochs",),
    "ppo_epochs": ("optimizer.epochs",),
    "epochs": ("run.iterations",),
    "num_epochs": ("run.iterations",),
    "num_train_epochs": ("run.iterations",),
    "max_steps": ("run.iterations",),
    "train_steps": ("run.iterations",),
    "max_train_steps": ("run.iterations",),
    "num_steps": ("sampler.steps", "run.iterations"),
    "num_iterations": ("run.iterations", "optimizer.epochs"),
    "num_inference_steps": ("sampler.steps", "evaluate.steps"),
    "eval_num_steps": ("evaluate.steps",),
    "eval_guidance_scale": ("evaluate.call.guidance_scale",),
    "diffusion_steps": ("sampler.steps",),
    "timestep_shift": ("sampler.shift",),
    "noise_level": ("sampler.kernel.eta",),
    "guidance": ("model.call.guidance_scale",),
    "guidance_scale": ("model.call.guidance_scale",),
    "cfg": ("model.call.guidance_scale",),
    "cfg_scale": ("model.call.guidance_scale",),
    "negative_prompt": ("model.call.negative_prompt",),
    "true_cfg_scale": ("model.call.true_cfg_scale",),
    "max_sequence_length": ("model.call.max_sequence_length",),
    "resolution": ("model.call.height", "model.call.width"),
    "image_size": ("model.call.height", "model.call.width"),
    "height": ("model.call.height",),
    "width": ("model.call.width",),
    "num_frames": ("model.call.num_frames",),
    "frames": ("model.call.num_frames",),
    "batch_size": ("rollout.batch", "rollout.prompts", "rollout.group"),
    "train_batch_size": ("rollout.batch", "rollout.prompts", "rollout.group"),
    "per_device_train_batch_size": ("rollout.batch", "rollout.prompts", "rollout.group"),
    "micro_batch_size": ("rollout.batch", "rollout.chunk", "rollout.tokens"),
    "gradient_accumulation_steps": ("rollout.batch", "optimizer.updates"),
    "num_prompts": ("rollout.prompts",),
    "group_size": ("rollout.group",),
    "num_generations": ("rollout.group",),
    "num_images_per_prompt": ("rollout.group",),
    "num_image_per_prompt": ("rollout.group",),
    "use_lora": ("model.train",),
    "lora_rank": ("model.lora.rank",),
    "lora_r": ("model.lora.rank",),
    "lora_alpha": ("model.lora.alpha",),
    "target_modules": ("model.lora.targets",),
    "lora_target_modules": ("model.lora.targets",),
    "lora_path": ("model.lora.start",),
    "mixed_precision": ("model.dtype",),
    "precision": ("model.dtype",),
    "torch_dtype": ("model.dtype",),
    "bf16": ("model.dtype",),
    "fp16": ("model.dtype",),
    "activation_checkpointing": ("model.gradient_checkpointing",),
    "model": ("model.path",),
    "pretrained_model": ("model.path",),
    "pretrained_model_name_or_path": ("model.path",),
    "model_name_or_path": ("model.path",),
    "model_name": ("model.path",),
    "model_id": ("model.path",),
    "base_model": ("model.path",),
    "attn_implementation": ("model.attention",),
    "torch_compile": ("model.compile",),
    "sp_size": ("model.context_parallel",),
    "cp_size": ("model.context_parallel",),
    "sp_degree": ("model.context_parallel",),
    "ulysses_degree": ("model.context_parallel",),
    "ulysses_size": ("model.context_parallel",),
    "ulysses_sequence_parallel_size": ("model.context_parallel",),
    "context_parallel_size": ("model.context_parallel",),
    "sequence_parallel_size": ("model.context_parallel",),
    "system_prompt": ("model.system",),
    "prompts": ("data.train",),
    "dataset": ("data.train",),
    "dataset_name": ("data.train",),
    "prompt_file": ("data.train",),
    "train_file": ("data.train",),
    "eval_dataset": ("data.heldout",),
    "validation": ("data.heldout",),
    "reward_fn": ("rewards",),
    "reward_funcs": ("rewards",),
    "reward_model": ("rewards",),
    "kl": ("penalties.kl.weight",),
    "kl_coef": ("penalties.kl.weight",),
    "kl_weight": ("penalties.kl.weight",),
    "kl_beta": ("penalties.kl.weight",),
    "clip": ("objective.surrogate.low", "objective.surrogate.high"),
    "clip_range": ("objective.surrogate.low", "objective.surrogate.high"),
    "cliprange": ("objective.surrogate.low", "objective.surrogate.high"),
    "epsilon": ("objective.surrogate.low", "objective.surrogate.high"),
    "epsilon_high": ("objective.surrogate.high",),
    "adv_clip_max": ("clamp",),
    "adv_mode": ("transform",),
    "max_new_tokens": ("generation.max_tokens", "generation.tokens"),
    "max_completion_length": ("generation.max_tokens", "generation.tokens"),
    "max_length": ("generation.max_tokens", "generation.tokens"),
    "gen_length": ("generation.tokens",),
    "max_prompt_length": ("generation.max_prompt_tokens",),
    "use_vllm": ("generation.engine",),
    "wandb": ("run.trackers",),
    "report_to": ("run.trackers",),
    "tracker": ("run.trackers",),
    "log_with": ("run.trackers",),
    "save_freq": ("run.checkpoint_every",),
    "save_steps": ("run.checkpoint_every",),
    "save_every": ("run.checkpoint_every",),
    "checkpointing_steps": ("run.checkpoint_every",),
    "save_total_limit": ("run.keep",),
    "optim": ("optimizer.type",),
    "optimizer_type": ("optimizer.type",),
    "use_8bit_adam": ("optimizer.type",),
    "use_adam8bit": ("optimizer.type",),
    "load_in_8bit": ("model.quantize",),
    "load_in_4bit": ("model.quantize",),
    "bnb_4bit_quant_type": ("model.quantize",),
    "quantization_config": ("model.quantize",),
    "sde_window_size": ("sampler.plan.window.size",),
    "eval_freq": ("evaluate.every",),
    "eval_steps": ("evaluate.every",),
    "eval_every": ("evaluate.every",),
}
"""Names that configurations of other tools use -> keys of a recipe."""

_FOLDER = (
    "out output output_dir output_path outdir dir folder run_dir work_dir workdir project_dir save_dir checkpoint_dir "
    "logdir log_dir logging_dir run_name exp_name"
)

OUTSIDE = {
    **dict.fromkeys(
        _FOLDER.split(),
        "the run folder is given on the command line, as `flowgrpo train --out FOLDER`",
    ),
    **dict.fromkeys(
        ("resume", "resume_from", "resume_from_checkpoint"), "a run is continued by `flowgrpo resume FOLDER`"
    ),
    **dict.fromkeys(("dry_run", "dryrun", "test_run"), "`flowgrpo plan` shows what a recipe does, without a run"),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "`flowgrpo push RUN OWNER/NAME` uploads the result of a run"),
    **dict.fromkeys(
        ("gpus", "num_gpus", "num_processes", "nproc_per_node", "world_size", "deepspeed", "fsdp"),
        "processes and GPUs are given to `accelerate launch`, see docs/scaling.md",
    ),
    **dict.fromkeys(("prodigy_beta3",), "the optimizer is AdamW, with averages in 32 or 8 bits (optimizer.type)"),
    **dict.fromkeys(("dropout", "lora_dropout"), "there is no dropout, because a step is scored as it was sampled"),
    **dict.fromkeys(("logging_steps", "log_freq", "log_every"), "`metrics.jsonl` has a line for every iteration"),
    **dict.fromkeys(("shuffle", "dataloader_shuffle"), "prompts are shuffled, in an order that follows from run.seed"),
    **dict.fromkeys(("device", "cuda"), "a run takes the GPU if there is one; ACCELERATE_USE_CPU=true forbids it"),
}
"""Names of other tools' settings that are no key of a recipe -> what is done here."""


def hint(place: tuple[Any, ...], given: Any, known: Sequence[str], schema: type[BaseModel]) -> str:
    """The end of a message about an unknown key: the key that was likely meant, or all keys of this section.

    Args:
        place: keys that lead to the unknown key, and the key itself.
        given: its value.
        known: keys of the section where it stands.
        schema: schema of the whole recipe.
    """
    key, places = str(place[-1]), _places(schema)
    inner = _inner(key, given)
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        within = ".".join([*map(str, place[:-1]), near[0], *inner[1:]])
        alike = difflib.SequenceMatcher(None, key, near[0]).ratio() > 0.85
        if (len(inner) > 1 and within in places) or (alike and (len(inner) == 1 or not _elsewhere(inner[-1], places))):
            return f"did you mean {near[0]!r}?"
    if inner[-1] in OUTSIDE:
        return OUTSIDE[inner[-1]]
    if found := _elsewhere(inner[-1], places):
        return f"did you mean {_listed(found)}?"
    owned = owners(key)
    if near:
        return f"did you mean {near[0]!r}?" + (f" {owned}" if owned else "")
    leaves = [one.rpartition(".")[2] for one in places]
    if not owned and (close := difflib.get_close_matches(inner[-1], leaves, n=1, cutoff=0.8)):
        if found := _elsewhere(close[0], places):
            return f"did you mean {_listed(found)}?"
        # A section is often thought to have a name, and a recipe's own name is no answer to that.
        if close[0] != "name":
            return f"did you mean {close[0]!r}, which is outside of all sections?"
    tasks = [task for task, other in SCHEMAS.items() if ".".join(map(str, place)) in _places(other)]
    told = f"recipes with task {' or '.join(tasks)} have it; " if tasks else ""
    return f"{told}known keys: {', '.join(known)}" + (f". {owned}" if owned else "")


def option_hint(option: str, value: str) -> str:
    """A sentence for an unknown option of a command, such as `--seed`, if a recipe has a key of this name; else empty.

    Args:
        option: the option, with its dashes.
        value: what was given for it.
    """
    name = option.lstrip("-").replace("-", "_")
    if name in ("config", "recipe", "config_file"):
        return f"A recipe is the first word, without an option: {value}"
    inner = name.rpartition(".")[2]
    if inner in OUTSIDE:
        return f"{OUTSIDE[inner][0].upper()}{OUTSIDE[inner][1:]}"
    keys = [f"{key}={value}" for key in _known_keys(name)]
    return f"Keys of a recipe are written without dashes: {_listed(keys[:3])}" if keys else ""


def known_key(option: str) -> str:
    """The key that is most likely meant by the name of an unknown option; empty if no recipe has one."""
    return next(iter(_known_keys(option.lstrip("-").replace("-", "_"))), "")


def _known_keys(name: str) -> list[str]:
    """Keys that some recipe has under this name: the very key, a key that ends like it, or another tool's name."""
    found = [name] if any(name in _places(schema) for schema in SCHEMAS.values()) and "." in name else []
    for schema in SCHEMAS.values():
        found += _elsewhere(name.rpartition(".")[2], _places(schema))
    return list(dict.fromkeys(found))


def _inner(key: str, given: Any) -> list[str]:
    """The keys of a dotted override, for an unknown first key: `sample`, `num_steps` for `sample.num_steps`."""
    keys = [key.replace("-", "_")]
    while isinstance(given, dict) and len(given) == 1:
        [(name, given)] = given.items()
        keys.append(str(name).replace("-", "_"))
    return keys


def _elsewhere(key: str, places: Sequence[str]) -> list[str]:
    """Up to three keys of a recipe that end with this name, or that other tools call by this name."""
    same = sorted((place for place in places if place.endswith(f".{key}")), key=lambda place: place.count("."))
    named = [place for place in OTHER_NAMES.get(key.lower(), ()) if _exists(place, places)]
    return list(dict.fromkeys([*named, *same]))[:3]


def _exists(place: str, places: Sequence[str]) -> bool:
    """Whether a recipe may have a key: a key of a section, or an option of a part or of a call."""
    section = place
    while section and section not in places:
        section = section.rpartition(".")[0]
    return section == place or (section != "" and not any(one.startswith(f"{section}.") for one in places))


@cache
def _places(schema: type[BaseModel]) -> tuple[str, ...]:
    """The dotted keys of all sections of a schema. Keys within lists have no place of their own."""
    return tuple(_walk(schema, ""))


def _walk(schema: type[BaseModel], before: str) -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield f"{before}{name}"
        options = [] if get_origin(field.annotation) is list else [field.annotation, *get_args(field.annotation)]
        for kind in options:
            # Python 3.10 takes `list[int]` for a type.
            if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _walk(kind, f"{before}{name}.")


def _listed(places: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(places[:-1]), places[-1]]))
