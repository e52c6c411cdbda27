"""The settings that the trainers of UniRL share: model, LoRA, optimizer, prompts and the length of a run."""

from __future__ import annotations

import posixpath

from .conversion import Conversion
from .unirl_keys import OPTIMIZER

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
PRECISIONS = {name: name for name in DTYPES.values()} | DTYPES | {"bfloat16": "bfloat16", "float16": "float16"}
PROMPTS = ("prompts/train.jsonl", "prompts/heldout.jsonl")
DATA = "data_source.args.run."
WHOLE_GROUPS = "an update takes whole groups here, and the next samples of each GPU there"


def model_of(conversion: Conversion) -> None:
    """The model, its computing type, and its LoRA."""
    settings = conversion.settings
    at = "bundle.config." if settings.has("bundle.config.pretrained_model_ckpt_path") else "model_config."
    key = f"{at}pretrained_model_ckpt_path"
    path = settings.text(key)
    if path is None:
        conversion.follow("not in the file", "model.path", "MODEL_FOLDER")
        conversion.want("the file does not name the model: write model.path, a folder or a hub id")
    else:
        conversion.carry(key, "model.path", path)
    precision = settings.text("bundle.config.model_precision") or "bf16"
    if precision not in PRECISIONS:
        raise settings.wrong("bundle.config.model_precision", ", ".join(DTYPES))
    # Weights in float32 are multiplied in the type of autocast.
    computed = settings.text("bundle.config.autocast_precision") if precision == "fp32" else None
    dtype = PRECISIONS.get(computed or precision, "bfloat16")
    keys = ["bundle.config.model_precision", *(["bundle.config.autocast_precision"] if computed else [])]
    conversion.carry(keys, "model.dtype", dtype, "computing type; trained weights are float32")
    keys = ["backend.fsdp_cfg.activation_checkpointing", "bundle.config.use_gradient_checkpointing"]
    on = [key for key in keys if settings.flag(key)]
    conversion.carry(on or keys[:1], "model.gradient_checkpointing", bool(on))
    conversion.used(*keys)
    if settings.flag("backend.fsdp_cfg.use_torch_compile") and "ar" not in (
        settings.text("algorithm.stage_attr") or ""
    ):
        conversion.carry("backend.fsdp_cfg.use_torch_compile", "model.compile", True)
    conversion.used("backend.fsdp_cfg.use_torch_compile")
    _adapter(conversion)


def _adapter(conversion: Conversion) -> None:
    settings = conversion.settings
    sections = ("backend.lora_cfg.", "backend.ema_lora_cfg.")
    at = next((one for one in sections if any(key.startswith(one) for key in settings.given)), None)
    if at is None:
        conversion.follow("no lora_cfg", "model.train", "full")
        return
    conversion.follow(f"with {at.split('.')[1]}", "model.train", "lora")
    conversion.carry(f"{at}rank", "model.lora.rank", settings.count(f"{at}rank"))
    conversion.carry(f"{at}alpha", "model.lora.alpha", settings.number(f"{at}alpha"))
    conversion.carry(f"{at}target_modules", "model.lora.targets", settings.texts(f"{at}target_modules"))
    conversion.follow("the beginning of peft", "model.lora.init", "default")
    if (settings.number(f"{at}dropout") or 0.0) > 0:
        text = "an adapter has no dropout: it would change the ratio before the weights move"
        conversion.lose(f"{at}dropout", text)
    elif settings.has(f"{at}dropout"):
        conversion.ignore(f"{at}dropout", "an adapter has no dropout here either")


def updates_of(conversion: Conversion) -> int:
    """Prompts and optimizer steps of an iteration; returns the optimizer steps."""
    settings = conversion.settings
    key = "data_source.args.algorithm.prompts_per_rollout"
    key = key if settings.has(key) else "batch_size"
    prompts = settings.count(key)
    conversion.carry(key, "rollout.prompts", prompts)
    updates, key = settings.count("stack.num_updates_per_batch"), "stack.num_updates_per_batch"
    note = WHOLE_GROUPS if updates > 1 else ""
    conversion.carry(key, "optimizer.updates", min(updates, prompts), note)
    return min(updates, prompts)


def optimizer_of(conversion: Conversion, updates: int) -> None:
    """AdamW and the learning rate."""
    settings, at = conversion.settings, "backend.scheduler_cfg."
    betas = [settings.number(f"{OPTIMIZER}adam_beta{k}") for k in (1, 2)]
    if None not in betas:
        conversion.carry([f"{OPTIMIZER}adam_beta1", f"{OPTIMIZER}adam_beta2"], "optimizer.betas", betas)
    conversion.follow("no average of the weights", "optimizer.ema", None)
    kind = settings.text(f"{at}type") or "constant"
    if kind not in ("constant", "linear", "cosine"):
        raise settings.wrong(f"{at}type", "constant, linear or cosine")
    conversion.carry(f"{at}type", "optimizer.schedule", kind)
    if kind == "linear" and (warmup := settings.whole(f"{at}warmup_steps") or 0) > 0:
        conversion.carry(f"{at}warmup_steps", "optimizer.warmup", warmup)
    total = settings.whole(f"{at}total_steps") or 0
    if kind != "constant" and total != (settings.whole("num_rollouts") or 0) * updates:
        text = "the rate reaches 0 after the last iteration here: set run.iterations to these optimizer steps"
        conversion.lose(f"{at}total_steps", f"{text}, divided by {updates}" if updates > 1 else text)
    if kind == "cosine" and settings.whole(f"{at}warmup_steps"):
        conversion.lose(
            f"{at}warmup_steps", "there the steps only shorten the fall; write optimizer.warmup to have some"
        )


def prompts_of(conversion: Conversion, evaluates: bool) -> None:
    """The files of prompts. Their program for images makes no evaluations."""
    settings = conversion.settings
    unsaid = "an environment variable names the file there: write this file, or another path"
    train = settings.text(f"{DATA}data_path")
    if train is None:
        conversion.follow("not in the file", "data.train", PROMPTS[0], unsaid)
        conversion.want(f"{unsaid} as data.train")
    else:
        conversion.carry(f"{DATA}data_path", "data.train", posixpath.normpath(train))
    heldout = settings.text(f"{DATA}eval_data_path")
    if not evaluates:
        key = f"{DATA}eval_data_path"
        note = "no evaluation, there too; a file of held-out prompts shows what a run gains"
        conversion.carry(key, "data.heldout", None, note)
    elif heldout is None:
        conversion.follow("not in the file", "data.heldout", PROMPTS[1], unsaid)
        conversion.want(f"{unsaid} as data.heldout")
    else:
        conversion.carry(f"{DATA}eval_data_path", "data.heldout", posixpath.normpath(heldout))
    conversion.used(f"{DATA}data_path", f"{DATA}eval_data_path")


def run_of(conversion: Conversion) -> None:
    """How often a checkpoint is kept."""
    every = conversion.settings.whole("save_interval") or 0
    if every > 0:
        conversion.carry("save_interval", "run.checkpoint_every", every)
