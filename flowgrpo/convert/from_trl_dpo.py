"""A DPOConfig of TRL as a recipe that trains on given answers; its files are as `from_trl` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .conversion import Conversion, Missing, PlainRow
from .foreign_settings import ForeignSettings
from .from_trl import ENDINGS, PROMPTS, hub_set
from .trl_keys import DEFAULTS, IDLE, MISSING
from .trl_settings import length_settings, model_settings, optimizer_settings

OF_DPO = {**DEFAULTS, "loss_type": ["sigmoid"], "beta": 0.1, "max_length": 1024, "f_divergence_type": "reverse_kl"}
"""What a DPOConfig takes where the file says nothing (version 1.16)."""
LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
"""Values of `loss_type` that only a DPOConfig has."""
KEYS = (
    "label_smoothing", "loss_weights", "precompute_ref_log_probs", "reference_free", "rpo_alpha", "f_divergence_type",
    "truncation_mode", "ld_alpha", "discopop_tau", "use_weighting",
)  # fmt: skip
"""Settings that only a DPOConfig has."""
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
    Missing("f_divergence_type", ("reverse_kl",), "losses have the reverse KL"),
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
    "f_alpha_divergence_coef": "losses have the reverse KL",
    "precompute_ref_*": "with a LoRA the reference is the model without it; with full weights a copy is kept",
    "truncation_mode": "longer pairs are left out, and not cut",
    "padding_free": "completions of a prompt are scored behind one copy of it, see model.shared_prefix",
    "activation_offloading": "see model.gradient_checkpointing",
    "model_adapter_name": "the reference is the base model",
    "ref_adapter_name": "the reference is the base model",
    "force_use_ref_model": "the reference is the base model",
    "eval_*": "evaluations sample answers, see evaluate",
}


UNBOUNDED = 2048
"""Tokens of a pair where the file sets no bound."""


def is_of_dpo(given: Mapping[str, Any]) -> bool:
    """Whether settings of TRL are of a DPOConfig."""
    losses = given.get("loss_type")
    if any(kind in LOSSES for kind in (losses if isinstance(losses, list) else [losses])):
        return True
    return any(key in given for key in KEYS) or ("max_length" in given and "reward_funcs" not in given)


def from_trl_dpo(path: Path, given: Mapping[str, Any], gpus: int | None) -> Conversion:
    """Convert a configuration file of DPO.

    Args:
        path: of the file.
        given: what the file holds.
        gpus: number of their processes; None if it is not known, and 1 is taken.

    Raises:
        ValueError: a value has a wrong type, or there is no such loss here.
    """
    settings = ForeignSettings(given, OF_DPO, str(path))
    conversion = Conversion(settings, settings.text("run_name") or path.stem)
    conversion.bases = ("text_dpo",)
    conversion.recipe["task"] = "text"
    for key, value in (
        ("rollout.form", "given"), ("rollout.group", 2), ("objective.name", "answers"),
        ("rewards", [{"name": "given"}]), ("generation.temperature", 1.0),
    ):  # fmt: skip
        conversion.follow("pairs of chosen and rejected", key, value)
    conversion.carry_rows(ROWS)
    model_settings(conversion)
    _loss(conversion)
    _sizes(conversion, gpus)
    optimizer_settings(conversion)
    length_settings(conversion, 1)
    _data(conversion)
    conversion.lose_rows((*NOT_HERE, *MISSING))
    conversion.finish({**WITHOUT_EFFECT, **IDLE})
    return conversion


def _loss(conversion: Conversion) -> None:
    settings = conversion.settings
    kinds, beta = settings.texts("loss_type") or ["sigmoid"], settings.number("beta")
    alpha = settings.number("rpo_alpha")
    weights = settings.value("loss_weights")
    shares = [1.0] * len(kinds) if weights is None else weights
    if not isinstance(shares, list) or len(shares) != len(kinds):
        raise settings.wrong("loss_weights", f"a list of {len(kinds)} numbers, one for each loss_type")
    each = [ForeignSettings({"loss_weights": one}, {}, settings.place).number("loss_weights") or 0.0 for one in shares]
    share = dict(zip(kinds, each))
    if kinds == ["sft"]:
        conversion.carry(
            "loss_type", "objective.loss", "likelihood", "a mean for each answer, and there over all tokens"
        )
        conversion.follow("chosen answers alone", "rollout.form", {"name": "given", "columns": ["chosen"]})
        conversion.follow("chosen answers alone", "rollout.group", 1)
        for key in ("baseline", "scale"):
            conversion.follow("chosen answers alone", f"advantage.{key}", "none")
        return
    if set(kinds) <= {"sigmoid", "sft"} and share.get("sigmoid", 0.0) > 0:
        alpha = share["sft"] / share["sigmoid"] if "sft" in share else alpha
        keys = ["loss_type", "beta", *(key for key in ("loss_weights", "rpo_alpha") if settings.has(key))]
        found: dict[str, Any] = {"name": "dpo", "beta": beta}
        if alpha:
            found = {"name": "rpo", "beta": beta, "alpha": alpha}
        conversion.carry(
            keys, "objective.loss", found, "the term of fine-tuning is a mean for each answer" if alpha else ""
        )
        return
    instead = {
        "robust": "write {name: dpo, smoothing: …}, which is conservative DPO, for labels that are wrong at times",
        "sft": "write loss_type: sft alone in the file, and convert it again",
        "ipo": "write {name: contrastive, beta: …} and advantage.scale: none, which is IPO on sums of log-probs",
    }
    other = next((kind for kind in kinds if kind not in ("sigmoid", "sft")), "sft")
    text = f"there is no such loss here; {instead.get(other, 'dpo, rpo, simpo, inpo and contrastive are there')}"
    conversion.lose("loss_type", text)
    conversion.carry("beta", "objective.loss", {"name": "dpo", "beta": beta}, "in the place of their loss")


def _sizes(conversion: Conversion, gpus: int | None) -> None:
    """Pairs of an optimizer step, and the longest prompt and answer."""
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
    note = "tokens that are scored at once: pairs of a device, each with two answers"
    conversion.carry(["per_device_train_batch_size", "max_length"], "rollout.tokens", 2 * device * longest, note)


def _data(conversion: Conversion) -> None:
    settings = conversion.settings
    name, train = settings.text("dataset_name"), settings.text("dataset_train_split") or "train"
    known = name if name is not None and name.endswith(ENDINGS) else hub_set(settings, train)
    keys = [key for key in ("dataset_name", "datasets", "dataset_config") if settings.value(key)] or "dataset_name"
    conversion.carry(keys if known else "dataset_name", "data.train", known or PROMPTS[0])
    if known is None:
        text = (
            f"write pairs into {PROMPTS[0]}, with columns prompt, chosen and rejected, or without prompt if the other "
        )
        conversion.lose(keys, f"{text}two are conversations")
    conversion.used("dataset_name", "datasets", "dataset_config", "dataset_train_split", "dataset_test_split")
    conversion.used("test_split_size", "eval_strategy", "eval_steps")
    conversion.follow("a loss of held-out pairs there", "data.heldout", None)
    conversion.want(
        "evaluations sample answers here: name held-out prompts as data.heldout, and a reward in evaluate.rewards"
    )
