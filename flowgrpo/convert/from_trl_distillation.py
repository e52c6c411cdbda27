"""What a DistillationConfig or a GKDConfig of TRL has in place of a GRPOConfig's comparison, loss and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .conversion import Conversion
from .from_trl import TrlTrainer
from .trl_keys import DEFAULTS

_SHARED = (
    "learning_rate", "max_completion_length", "temperature", "top_p", "top_k", "gradient_checkpointing",
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "lr_scheduler_type", "seed", "num_train_epochs", "max_steps", "eval_strategy",
    "save_steps", "logging_steps", "use_vllm", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "dtype", "vllm_mode",
    "dataset_train_split",
)  # fmt: skip
OF_DISTILLATION = {**{key: DEFAULTS[key] for key in _SHARED}, "beta": 1.0}
"""What a DistillationConfig takes where the file says nothing (version 1.16)."""
_OWN = {
    "learning_rate": 2e-5, "temperature": 0.9, "lmbda": 0.5, "beta": 0.5, "max_new_tokens": 128, "seq_kd": False,
}  # fmt: skip
OF_GKD = {key: value for key, value in OF_DISTILLATION.items() if key != "max_completion_length"} | _OWN
"""The same of an experimental GKDConfig."""
KEYS = ("teacher_model_name_or_path", "teacher_model_init_kwargs", "teacher_model_revision", "lmbda", "seq_kd")
"""Settings that only these configurations have."""
TEACHER = "TEACHER_FOLDER"
"""The path of a teacher that the file does not name."""
TOP = 100
"""How many tokens the divergence tells apart. All tokens of a large vocabulary would take gigabytes."""
_IDLE = {
    "teacher_model_init_kwargs": "the teacher is loaded as the model is",
    "eval_*": "evaluations sample answers, see evaluate",
}


def is_of_gkd(given: Mapping[str, Any]) -> bool:
    """Whether settings of TRL are of a GKDConfig."""
    alone = "lmbda" in given and "max_completion_length" not in given  # older versions of both have lmbda
    return alone or "seq_kd" in given or "max_new_tokens" in given


def _method(conversion: Conversion) -> None:
    settings = conversion.settings
    conversion.follow("one completion of a prompt", "rollout.group", 1)
    path = settings.text("teacher_model_name_or_path")
    if path is None:
        conversion.follow("not in the file", "model.teachers", [{"path": TEACHER}])
        conversion.want(
            "the file does not name the teacher: write model.teachers, with the path of a folder or a hub id"
        )
    else:
        conversion.carry("teacher_model_name_or_path", "model.teachers", [{"path": path}])
    conversion.used("teacher_model_name_or_path")
    if settings.text("teacher_model_revision") not in (None, "main"):
        conversion.lose("teacher_model_revision", "download this revision, and give its folder in model.teachers")
    conversion.used("teacher_model_revision")
    _divergence(conversion)
    _own_completions(conversion)
    conversion.follow("no penalty", "penalties", [])
    limit = 4 * conversion.recipe["generation"]["max_tokens"]
    conversion.follow(
        "no reward", "rewards", [{"name": "length", "options": {"limit": limit}}],
        "rewards are only reported; name one that says whether an answer is right",
    )  # fmt: skip


def _divergence(conversion: Conversion) -> None:
    settings = conversion.settings
    beta = settings.number("beta")
    if beta is None or not 0 <= beta <= 1:
        raise settings.wrong("beta", "a number from 0 (the forward KL) to 1 (the reverse KL)")
    ends = {0.0: "forward", 1.0: "reverse"}
    found: dict[str, Any] = {"name": "distilled", "others": "none", "direction": ends.get(beta, "jsd")}
    found |= {} if beta in ends else {"beta": beta}
    note = f"over the {TOP} tokens that are likeliest for the teacher and one bin for all others; over all tokens there"
    conversion.carry("beta", "objective", found | {"top": TOP}, note)


def _own_completions(conversion: Conversion) -> None:
    settings = conversion.settings
    if settings.value("lmbda") is not None and settings.number("lmbda") != 1:
        conversion.lose(
            "lmbda",
            "all completions are the policy's own here, which is 1; rollout.form: {name: given, columns: [COLUMN]} has "
            "completions of the data alone, which is 0",
        )
    conversion.used("lmbda")
    if settings.value("seq_kd") is not None and settings.flag("seq_kd"):
        conversion.lose(
            "seq_kd", "write the teacher's completions into a column of the prompts, for rollout.form: given"
        )
    conversion.used("seq_kd")


DISTILLATION = TrlTrainer(OF_DISTILLATION, ("text_opd", "text"), _method, _IDLE)
"""A DistillationConfig."""
GKD = TrlTrainer(OF_GKD, ("text_opd", "text"), _method, _IDLE, "max_new_tokens")
"""A GKDConfig."""
