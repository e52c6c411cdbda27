"""A DPOConfig of TRL, or one like it, as a recipe that trains on given answers; files are as `from_trl` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .conversion import Conversion, Missing, PlainRow
from .foreign_settings import ForeignSettings
from .from_trl import ENDINGS, PROMPTS, hub_set
from .trl_answer_losses import DPO, AnswerTrainer, trainer_is_told
from .trl_keys import DEFAULTS, IDLE, MISSING
from .trl_settings import length_settings, model_settings, optimizer_settings

OF_ANSWERS = {**DEFAULTS, "beta": 0.1, "max_length": 1024}
"""What most of these configurations take where the file says nothing (version 1.16)."""
ROWS = (
    PlainRow("learning_rate", "optimizer.learning_rate"),
    PlainRow("weight_decay", "optimizer.weight_decay"),
    PlainRow("adam_epsilon", "optimizer.eps"),
    PlainRow("max_grad_norm", "optimizer.max_grad_norm"),
    PlainRow("seed", "run.seed", "whole", "the random numbers are others"),
    PlainRow("save_total_limit", "run.keep", "count"),
)
NOT_HERE = (
    Missing("ld_alpha", (1.0,), "no loss weighs the tokens beyond the shorter answer otherwise; leave it out"),
    Missing("use_weighting", (), "pairs are not weighted by how likely they are"),
    Missing("reference_free", (), "the loss simpo has no reference: write objective.loss: simpo"),
    Missing("tools", (), "there are no tool calls here"),
)
WITHOUT_EFFECT = {
    "pad_token": "padding is masked, whatever its token",
    "loss_weights": "there is one loss",
    "label_smoothing": "the loss of this file does not read it",
    "rpo_alpha": "the loss of this file does not read it",
    "discopop_tau": "the loss of this file does not read it",
    "f_alpha_divergence_coef": "the divergence of this file does not read it",
    "precompute_ref_*": "with a LoRA the reference is the model without it; with full weights a copy is kept",
    "truncation_mode": "longer pairs are left out, and not cut",
    "padding_free": "completions of a prompt are scored behind one copy of it, see model.shared_prefix",
    "activation_offloading": "see model.gradient_checkpointing",
    "use_*logits_to_keep": "logits are taken of answers alone",
    "base_model_attribute_name": "no kernels of Liger are used",
    "padding_value": "padding is masked, whatever its token",
    "label_pad_token_id": "padding is masked, whatever its token",
    "generate_during_eval": "evaluations sample answers, see evaluate",
    "is_encoder_decoder": "the model is a causal one",
    "model_adapter_name": "the reference is the base model",
    "ref_adapter_name": "the reference is the base model",
    "force_use_ref_model": "the reference is the base model",
    "eval_*": "evaluations sample answers, see evaluate",
}


UNBOUNDED = 2048
"""Tokens of a pair where the file sets no bound."""


def from_trl_dpo(path: Path, given: Mapping[str, Any], gpus: int | None, trainer: AnswerTrainer = DPO) -> Conversion:
    """Convert a configuration file of DPO, or of another trainer on given answers.

    Args:
        path: of the file.
        given: what the file holds.
        trainer: whose file it is.
        gpus: number of their processes; None if it is not known, and 1 is taken.

    Raises:
        ValueError: a value has a wrong type, or there is no such loss here.
    """
    settings = ForeignSettings(given, {**OF_ANSWERS, **trainer.defaults}, str(path))
    conversion = Conversion(settings, settings.text("run_name") or path.stem)
    conversion.bases = ("text_dpo",)
    conversion.recipe["task"] = "text"
    for key, value in (
        ("rollout.form", {"name": "given", "columns": list(trainer.columns)}), ("rollout.group", len(trainer.columns)),
        ("objective.name", "answers"), ("rewards", [{"name": "given"}]), ("generation.temperature", 1.0),
    ):  # fmt: skip
        conversion.follow(f"columns {', '.join(trainer.columns)}", key, value)
    conversion.carry_rows(ROWS)
    model_settings(conversion)
    if not trainer_is_told(given):
        conversion.want(
            "nothing in the file says which trainer it is for, and it was read as a DPOConfig; if it is one, write "
            "loss_type: sigmoid into it. For an ORPOConfig, write objective.loss: {name: orpo, weight: "
            f"{settings.number('beta'):g}}}; for supervised fine-tuning, write loss_type: sft, and convert it again; "
            "no reward model is trained here"
        )
    trainer.loss(conversion)
    _sizes(conversion, gpus, len(trainer.columns))
    optimizer_settings(conversion)
    length_settings(conversion, 1)
    _data(conversion, trainer)
    conversion.lose_rows((*NOT_HERE, *MISSING))
    conversion.finish({**WITHOUT_EFFECT, **IDLE})
    return conversion


def _sizes(conversion: Conversion, gpus: int | None, answers: int) -> None:
    """Prompts of an optimizer step, and the longest prompt and answer."""
    settings, many = conversion.settings, gpus or 1
    if gpus is None:
        conversion.want(
            "the file does not say on how many GPUs it ran; say it with --gpus, since it decides rollout.prompts"
        )
    device, passes = settings.count("per_device_train_batch_size"), settings.count("gradient_accumulation_steps")
    keys = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    conversion.carry(keys, "rollout.prompts", device * passes * many, f"{device} × {passes} batches × {many} GPUs")
    longest, note = settings.whole("max_length") or UNBOUNDED, "a longer pair is left out, and not cut"
    for theirs, ours in (("max_prompt_length", "max_prompt_tokens"), ("max_completion_length", "max_tokens")):
        own = settings.whole(theirs) if settings.has(theirs) else None
        conversion.carry(theirs if own else "max_length", f"generation.{ours}", own or longest, note)
        conversion.used(theirs)
    conversion.follow("too long pairs", "generation.long_prompts", "drop")
    note = "tokens that are scored at once: prompts of a device, with all their answers"
    conversion.carry(["per_device_train_batch_size", "max_length"], "rollout.tokens", answers * device * longest, note)


def _data(conversion: Conversion, trainer: AnswerTrainer) -> None:
    settings = conversion.settings
    name, train = settings.text("dataset_name"), settings.text("dataset_train_split") or "train"
    known = name if name is not None and name.endswith(ENDINGS) else hub_set(settings, train)
    keys = [key for key in ("dataset_name", "datasets", "dataset_config") if settings.value(key)] or "dataset_name"
    conversion.carry(keys if known else "dataset_name", "data.train", known or PROMPTS[0])
    if known is None:
        columns = ", ".join(("prompt", *trainer.columns))
        text = f"write the data into {PROMPTS[0]}, with columns {columns}"
        if trainer.columns == DPO.columns:
            text += ", or without prompt if the other two are conversations"
        conversion.lose(keys, text + (", and label" if trainer.config == "a KTOConfig" else ""))
    conversion.used("dataset_name", "datasets", "dataset_config", "dataset_train_split", "dataset_test_split")
    conversion.used("test_split_size", "eval_strategy", "eval_steps")
    conversion.follow("a loss of held-out pairs there", "data.heldout", None)
    conversion.want(
        "evaluations sample answers here: name held-out prompts as data.heldout, and a reward in evaluate.rewards"
    )
