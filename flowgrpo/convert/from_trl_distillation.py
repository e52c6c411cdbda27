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
_OF_IW_OPD = {
    "learning_rate": 1e-6, "lmbda": 1.0, "distillation_objective": "iw_opd", "iw_opd_gamma": 0.5, "beta": 1.0,
    "top_p": 0.95,
}  # fmt: skip
OF_IW_OPD = OF_DISTILLATION | _OF_IW_OPD
"""The same of an experimental IWOPDConfig."""
KEYS = (
    "teacher_model_name_or_path", "teacher_model_init_kwargs", "teacher_model_revision", "teacher_model_server_url",
    "lmbda", "seq_kd", "distillation_objective", "iw_opd_gamma",
)  # fmt: skip
"""Settings that only these configurations have."""
TEACHER = "TEACHER_FOLDER"
"""The path of a teacher that the file does not name."""
TOP = 100
"""How many tokens the divergence tells apart. All tokens of a large vocabulary would take gigabytes."""
BINNED = (
    "the divergence is over the objective.top tokens that are likeliest for the teacher, and one bin for all others"
)
_CUT = "generation.max_prompt_tokens and generation.max_tokens are the bounds, and nothing is cut"
_IDLE = {
    "teacher_model_init_kwargs": "the teacher is loaded as the model is",
    "eval_*": "evaluations sample answers, see evaluate",
    "uld_*": "only the loss for a teacher with another tokenizer reads it",
    "use_extended_uld": "only the loss for a teacher with another tokenizer reads it",
}
_OF_SFT = "a GKDConfig has it from SFTConfig, and distillation does not need it"
_IDLE_OF_GKD = {
    **_IDLE,
    **dict.fromkeys(
        ("dataset_text_field", "truncation_mode", "packing*", "padding_free", "assistant_only_loss", "loss_type",
         "completion_only_loss", "activation_offloading", "eval_packing"), _OF_SFT,
    ),
    "max_length": _CUT,
}  # fmt: skip


def _method(conversion: Conversion) -> None:
    settings = conversion.settings
    if settings.value("num_generations") is None:
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
    if settings.text("teacher_model_server_url") is not None:
        conversion.lose("teacher_model_server_url", "a teacher is loaded here, and no server is asked")
    if settings.value("use_uld_loss") is not None and settings.flag("use_uld_loss"):
        conversion.lose("use_uld_loss", "a teacher has the tokenizer of the model here; use such a teacher")
    conversion.used("teacher_model_server_url", "use_uld_loss")
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
    if settings.value("distillation_objective") == "iw_opd":
        early: dict[str, Any] = {"name": "distilled", "others": "none", "direction": "reverse", "top": TOP}
        early["early"] = settings.number("iw_opd_gamma")
        note = "the reverse KL of each token in the place of its estimate by the token that was drawn"
        conversion.used("beta")
        conversion.carry(["distillation_objective", "iw_opd_gamma"], "objective", early, note)
        return
    conversion.used("distillation_objective")
    for key in ("loss_top_k", "loss_add_tail", "reverse_kl_top_1_mode"):
        if settings.has(key):
            conversion.lose(key, BINNED)
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
            "all completions are the policy's own here, which is 1; if a column of the data has completions, write "
            f"rollout.form: {{name: given, columns: [COLUMN], own: {settings.number('lmbda'):g}}}",
        )
    conversion.used("lmbda")
    if settings.value("seq_kd") is not None and settings.flag("seq_kd"):
        conversion.lose(
            "seq_kd", "write the teacher's completions into a column of the prompts, for rollout.form: given"
        )
    conversion.used("seq_kd")


DISTILLATION = TrlTrainer("a DistillationConfig", OF_DISTILLATION, ("text_opd", "text"), _method, _IDLE)
"""A DistillationConfig."""
GKD = TrlTrainer("a GKDConfig", OF_GKD, ("text_opd", "text"), _method, _IDLE_OF_GKD, "max_new_tokens")
"""A GKDConfig."""
GOLD = TrlTrainer(
    "a GOLDConfig", OF_DISTILLATION | {**_OWN, "max_completion_length": 128, "learning_rate": 1e-7, "top_p": 0.95},
    ("text_opd", "text"), _method, _IDLE_OF_GKD,
)  # fmt: skip
"""A GOLDConfig, which is a GKDConfig that may have a teacher with another tokenizer."""


IW_OPD = TrlTrainer(
    "an IWOPDConfig", OF_IW_OPD, ("text_opd", "text"), _method,
    {
        **_IDLE, "max_length": _CUT, "iw_opd_epsilon": "sums below 1e-8 count as 1e-8",
        "use_teacher_server": "no server is asked",
        "loss_*": "the loss of this file does not read it", "reverse_kl*": "the loss of this file does not read it",
    },
)  # fmt: skip
"""An IWOPDConfig."""


def trainer_of(given: Mapping[str, Any]) -> TrlTrainer:
    """The trainer that distils and has these settings."""
    if "distillation_objective" in given or "iw_opd_gamma" in given:
        return IW_OPD
    if "use_uld_loss" in given or ("seq_kd" in given and "max_completion_length" in given):
        return GOLD
    alone = "lmbda" in given and "max_completion_length" not in given  # older versions of both have lmbda
    return GKD if alone or "seq_kd" in given or "max_new_tokens" in given else DISTILLATION
