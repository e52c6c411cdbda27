"""A configuration of UniRL's trainer for text as a recipe."""

from __future__ import annotations

from typing import Any

from .conversion import Conversion
from .foreign_settings import named
from .unirl_keys import ROWS
from .unirl_methods import EPS, old_log_probs
from .unirl_rewards import rewards
from .unirl_settings import model_of, optimizer_of, prompts_of, run_of, updates_of

ALGORITHMS = ("GRPO", "DRPO")
REDUCE: dict[str, dict[str, Any]] = {
    "token-mean": {"reduce": "token"},
    "seq-mean-token-mean": {"reduce": "sequence"},
    "seq-mean-token-sum-norm": {"reduce": "sum", "constant": True},
}
"""Their loss_agg_mode -> what our loss is a mean of."""


def text_run(conversion: Conversion, name: str) -> None:
    """Fill in a recipe of text.

    Args:
        conversion: of the file.
        name: folder of the model's code.

    Raises:
        ValueError: the algorithm has no counterpart here, or a value is wrong.
    """
    settings = conversion.settings
    conversion.bases = ("text",)
    conversion.follow(f"the model {name}", "task", "text")
    conversion.carry_rows(ROWS)
    model_of(conversion)
    _chat(conversion, name)
    _generation(conversion)
    updates = updates_of(conversion)
    _objective(conversion)
    _comparison(conversion)
    conversion.follow("no KL", "penalties", [])
    optimizer_of(conversion, updates)
    rewards(conversion)
    _truncated(conversion)
    every = settings.whole("eval_interval") or 0
    prompts_of(conversion, evaluates=every > 0)
    if every > 0:
        _evaluation(conversion, every)
    conversion.carry("data_source.args.run.seed", "run.seed", settings.whole("data_source.args.run.seed") or 0)
    run_of(conversion)
    text = "completions are sampled and scored with as many tokens at once as rollout.tokens says"
    conversion.ignore("stack.micro_batch_size", text)


def _chat(conversion: Conversion, name: str) -> None:
    settings = conversion.settings
    if name == "qwen_vl":
        conversion.follow("a model that sees", "model.pictures", True)
        conversion.want("the prompt file needs a column `image` with the path of a picture for each prompt")
        key = "bundle.config.freeze_vision_tower"
        if settings.flag(key) and conversion.recipe["model"]["train"] == "full":
            conversion.lose(
                key, "model.train full trains all weights; write lora, which is on the language model alone"
            )
        conversion.used(key)
    else:
        thinking = settings.flag("pipeline.enable_thinking")
        key = "pipeline.enable_thinking"
        conversion.carry(key, "model.chat_template_kwargs", {"enable_thinking": thinking})
    if (said := settings.text("pipeline.system_instruction")) is not None:
        conversion.carry("pipeline.system_instruction", "model.system", said)
    conversion.used("rollout.config.chat_template_kwargs.enable_thinking")
    for key in ("pipeline.max_prompt_length", "bundle.config.max_prompt_length"):
        if settings.has(key):
            note = "a longer prompt is refused, and not cut"
            conversion.carry(key, "generation.max_prompt_tokens", settings.count(key), note)
            conversion.used("pipeline.max_prompt_length", "bundle.config.max_prompt_length")
            return


def _generation(conversion: Conversion) -> None:
    settings = conversion.settings
    conversion.carry("sampling.max_new_tokens", "generation.max_tokens", settings.count("sampling.max_new_tokens"))
    conversion.carry("sampling.temperature", "generation.temperature", settings.number("sampling.temperature"))
    top_p, top_k = settings.number("sampling.top_p"), settings.whole("sampling.top_k") or 0
    note = "there a token is scored as if all could be drawn; here among those that could"
    carried = None if top_p is None or top_p >= 1 else top_p
    conversion.carry("sampling.top_p", "generation.top_p", carried, note if carried else "")
    carried = top_k if top_k > 1 else None
    conversion.carry("sampling.top_k", "generation.top_k", carried, note if carried else "")
    key = "algorithm.sampling_temperature"
    if settings.has(key) and settings.number(key) != settings.number("sampling.temperature"):
        conversion.lose(key, "completions are scored with the temperature that samples them")
    conversion.used(key)
    engine = settings.text("rollout._target_") or ""
    if "sglang" in engine.lower() or "vllm" in engine.lower():
        text = "transformers samples here; generation.engine: vllm is faster, and its log-probabilities are corrected"
        conversion.lose("rollout._target_", text)
    old_log_probs(conversion)


def _objective(conversion: Conversion) -> None:
    settings = conversion.settings
    kind = (settings.text("algorithm._target_") or "").rpartition(".")[2]
    if kind not in ALGORITHMS:
        raise ValueError(
            f"{settings.place}: algorithm._target_ is {named(kind)}, which has no counterpart here; for text these "
            f"have one: {', '.join(ALGORITHMS)}. Change it in a copy of the file, and convert the copy"
        )
    mode = settings.text("algorithm.loss_agg_mode")
    if mode not in REDUCE:
        raise settings.wrong("algorithm.loss_agg_mode", ", ".join(REDUCE))
    if kind == "GRPO":
        low, high = settings.number("algorithm.clip_range"), settings.number("algorithm.clip_range_high")
        surrogate: dict[str, Any] = {"name": "clip", "low": low, "high": low if high is None else high}
        keys = ["algorithm.clip_range", *(["algorithm.clip_range_high"] if high is not None else [])]
        schedule = settings.text("algorithm.clip_schedule")
        if schedule in ("linear_decay", "cosine_decay"):
            conversion.lose("algorithm.clip_schedule", "the bounds of the ratio stay as they are")
        conversion.used("algorithm.clip_schedule", "algorithm.clip_range_high")
    else:
        by = "probability" if settings.flag("algorithm.penalty_mu_weighted") else "ratio"
        surrogate = {"name": "spo", "epsilon": settings.number("algorithm.drpo_epsilon"), "by": by}
        keys = ["algorithm.drpo_epsilon", "algorithm.penalty_mu_weighted"]
    notes = []
    if mode == "token-mean":
        notes.append("the mean is over the tokens of an update here, and of a micro batch there")
    horizon, longest = settings.number("algorithm.horizon"), settings.number("sampling.max_new_tokens")
    if mode == "seq-mean-token-sum-norm":
        keys.append("algorithm.horizon")
        if horizon != longest:
            notes.append("sums are divided by generation.max_tokens here; AdamW takes no notice of the factor")
    conversion.used("algorithm.horizon")
    keys = ["algorithm._target_", *keys, "algorithm.loss_agg_mode"]
    objective = {"name": "tokens", "surrogate": surrogate, **REDUCE[mode], "level": "token"}
    conversion.carry(keys, "objective", objective, "; ".join(notes))


def _comparison(conversion: Conversion) -> None:
    """Advantages of completions, within the group or with all completions; they have no bound."""
    settings = conversion.settings
    scope, by_std = settings.text("adv_normalization_scope"), settings.flag("normalize_adv_by_std")
    keys, note = ["adv_normalization_scope", "normalize_adv_by_std"], ""
    if scope not in ("group", "global"):
        raise settings.wrong("adv_normalization_scope", "group or global")
    advantage: dict[str, Any]
    if scope == "global":
        # The comparison within the group gets no weight.
        advantage = {"name": "anchored", "k": 1e-9, "ddof": 1, "eps": EPS}
        note = "with all completions, and not within the group"
        if not by_std:
            conversion.lose("normalize_adv_by_std", "with all completions, advantages are divided by their deviation")
    elif by_std:
        advantage, note = {"name": "group", "scale": "group", "ddof": 0, "eps": EPS}, "they add 1e-8 to the variance"
    else:
        advantage = {"name": "group", "scale": "none"}
    conversion.carry(keys, "advantage", advantage, note)
    conversion.follow("advantages have no bound", "clamp", None)


def _truncated(conversion: Conversion) -> None:
    """What a completion that was cut off gets."""
    settings, key = conversion.settings, "reward.truncated_reward"
    kind = settings.text(key)
    limit = settings.count("sampling.max_new_tokens")
    if kind == "soft":
        buffer, factor = (
            settings.number("reward.overlong_buffer_len"),
            settings.number("reward.overlong_penalty_factor"),
        )
        entry: dict[str, Any] = {"name": "length", "weight": factor or 1.0}
        tokenizer = conversion.recipe["model"]["path"]
        entry["options"] = {"limit": limit, "buffer": min(buffer or 0, limit), "unit": "tokens", "tokenizer": tokenizer}
        keys = [key, "reward.overlong_buffer_len", "reward.overlong_penalty_factor"]
        conversion.carry(keys, "rewards", [*conversion.recipe["rewards"], entry])
        return
    if kind == "zero":
        text = "a completion that was cut off keeps its reward here; objective.drop_truncated: true leaves it out"
        conversion.lose(key, text)
    elif kind != "keep":
        raise settings.wrong(key, "zero, keep or soft")
    conversion.used(key)


def _evaluation(conversion: Conversion, every: int) -> None:
    settings = conversion.settings
    conversion.carry("eval_interval", "evaluate.every", every)
    conversion.carry("eval_num_prompts", "evaluate.prompts", settings.count("eval_num_prompts"))
    conversion.follow("the first prompts of the file", "evaluate.take", "first")
    conversion.carry("eval_samples_per_prompt", "evaluate.seeds", settings.count("eval_samples_per_prompt"))
    conversion.carry("eval_temperature", "evaluate.temperature", settings.number("eval_temperature"))
