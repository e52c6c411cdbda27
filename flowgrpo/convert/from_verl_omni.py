"""A script of verl-omni as a recipe: its settings, model, batches, data. `verl_omni_methods.py` has the algorithms."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..configs.explaining import short
from ..configs.yaml_text import parse_yaml_value
from .conversion import Conversion, Remark
from .flow_grpo_scripts import model_word
from .foreign_settings import ForeignSettings, named
from .from_flow_grpo import LENGTH
from .reward_names import entry_of
from .shell_words import ShellScript, Word
from .verl_omni_keys import (
    ACTOR,
    DEFAULTS,
    IDLE,
    MISSING,
    MODEL,
    PIPELINE,
    REWARDS,
    ROLLOUT,
    ROWS,
    VALIDATION,
)
from .verl_omni_methods import method

MODULES = ("verl_omni.trainer.main_diffusion", "verl_omni.trainer.main_diffusion_v1")
OTHERS = ("verl_omni.trainer.main_omni", "verl_omni.trainer.main_omni_v1", "verl.trainer.main_ppo")
REFUSED = {
    "bagel": "BAGEL, which is no pipeline of diffusers",
    "minimax-h3": "MiniMax-H3, which is no pipeline of diffusers",
    "minimax_h3": "MiniMax-H3, which is no pipeline of diffusers",
}
"""Words in the paths of models that cannot be trained here, and why."""
GUIDED_TWICE = ("qwen",)
"""Words in the paths of models whose call has true_cfg_scale."""


def from_verl_omni(path: Path, text: str) -> Conversion:
    """Convert a script that starts verl-omni. The script is read and never executed.

    Args:
        path: of the script.
        text: of the script.

    Raises:
        ValueError: the script has no such command, a value has a wrong type, or the model or the loss has no
            counterpart here.
    """
    given, origins, unsaid = settings_of(path, text)
    settings = ForeignSettings(given, DEFAULTS, str(path), origins)
    model = settings.text(f"{MODEL}path") or ""
    told = f"{model} {settings.value(f'{MODEL}architecture')} {settings.value(f'{ROLLOUT}agent.default_agent_loop')}"
    for name, why in REFUSED.items():
        if name in told.lower():
            raise ValueError(f"{path}: the model is {why}; see docs/own_model.md for what a model needs")
    conversion = Conversion(settings, settings.text("trainer.experiment_name") or path.stem)
    conversion.carry_rows(ROWS)
    _model(conversion)
    _call(conversion)
    updates = _batches(conversion)
    method(conversion, updates)
    _optimizer(conversion, updates)
    _rewards(conversion)
    _data(conversion, {key: word.unsaid for key, word in unsaid.items()})
    _evaluation(conversion)
    _length(conversion)
    for key, word in unsaid.items():
        if key in conversion.settings.given or key in ("data.train_files", "data.val_files"):
            continue
        if any(fnmatchcase(key, pattern) for pattern in NOT_NEEDED):
            conversion.idle.append(Remark(named(key), next(why for one, why in IDLE.items() if fnmatchcase(key, one))))
            continue
        told = f"{', '.join(word.unsaid)[:80]} says it when the script runs; write the value into a copy of the script"
        conversion.lost.append(Remark(named(key), told))
    conversion.lose_rows(MISSING)
    conversion.finish(IDLE)
    return conversion


NOT_NEEDED = ("trainer.*_dir", "trainer.*_name", f"{ROLLOUT}engine_kwargs.*", "global_profiler.*")
"""Keys whose values only a run shows, and that have no effect here."""


def settings_of(path: Path, text: str) -> tuple[dict[str, Any], dict[str, str], dict[str, Word]]:
    """What a script sets: dotted key -> value, where a value comes from, and the words that only a run shows.

    Raises:
        ValueError: the script does not start verl-omni's training of images.
    """
    script = ShellScript(path, text)
    words = next((found for module in reversed(MODULES) if (found := script.command(module)) is not None), None)
    if words is None:
        other = next((module for module in OTHERS if script.command(module) is not None), None)
        if other is not None:
            raise ValueError(
                f"{path} runs {other}, which trains a language model that hears and sees (an omni thinker); such a "
                "model cannot be trained here. Convert a script that runs verl_omni.trainer.main_diffusion"
            )
        raise ValueError(
            f"{path} has no command `python3 -m {MODULES[0]} KEY=VALUE …`; give the script that has it, and write the "
            "command itself in place of a list of arguments or another script"
        )
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    unsaid: dict[str, Word] = {}
    for word in words:
        key, equals, value = word.text.partition("=")
        if key == "--config-name" and "offline" in value:
            given["algorithm.sample_source"], origins["algorithm.sample_source"] = "offline", f"by {word.text[:60]}"
        key = key.lstrip("+")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.@/-]*", key):
            continue
        unsaid.pop(key, None)
        given.pop(key, None)
        if word.unsaid:
            unsaid[key] = word
            # A file of a reward is known by its name, wherever its folder is.
            if not key.endswith(".path"):
                continue
        for inner, held in _flat(key, _value(value)):
            given[inner] = held
            if word.assumed:
                origins[inner] = f"the default of {', '.join(dict.fromkeys(f'${name}' for name in word.assumed))}"
            elif word.chosen:
                origins[inner] = f"one of the values of {', '.join(dict.fromkeys(f'${name}' for name in word.chosen))}"
    return given, origins, unsaid


def _value(text: str) -> Any:
    """A value as hydra reads it: a number, a list, true, null, a quoted text, or else the text itself."""
    try:
        return parse_yaml_value(text)
    except ValueError:
        return text


def _flat(key: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(key, value)]
    return [pair for inner, held in value.items() for pair in _flat(f"{key}.{inner}", held)]


def _model(conversion: Conversion) -> None:
    settings = conversion.settings
    if (settings.text(f"{MODEL}path") or "").startswith("~"):
        conversion.want("model.path is in the home folder: write the whole path of this folder, or a hub id")
    conversion.follow("weights of bfloat16 or under autocast", "model.dtype", "bfloat16", "trained weights are float32")
    rank = settings.whole(f"{MODEL}lora_rank") or 0
    if rank <= 0:
        conversion.carry(f"{MODEL}lora_rank", "model.train", "full")
    else:
        conversion.follow("with lora_rank", "model.train", "lora")
        conversion.carry(f"{MODEL}lora_rank", "model.lora.rank", rank)
        conversion.carry(f"{MODEL}lora_alpha", "model.lora.alpha", settings.number(f"{MODEL}lora_alpha"))
        init = "gaussian" if settings.text(f"{MODEL}lora_init_weights") == "gaussian" else "default"
        conversion.carry(f"{MODEL}lora_init_weights", "model.lora.init", init)
        layers = settings.texts(f"{MODEL}target_modules") or ["all-linear"]
        conversion.carry(f"{MODEL}target_modules", "model.lora.targets", layers)
    key = f"{MODEL}attn_backend"
    backend = settings.text(key)
    if backend is not None and ("hub" in backend.lower() or "npu" in backend.lower()):
        conversion.lose(
            key, "it would run code that is fetched from the hub, or needs another device; see model.attention"
        )
    elif backend is not None:
        conversion.carry(key, "model.attention", backend)
    for part in ("param_offload", "optimizer_offload"):
        conversion.used(f"{ACTOR}fsdp_config.{part}")
        if settings.flag(f"{ACTOR}fsdp_config.{part}"):
            text = "weights that do not fit beside the states are cut into shards: see docs/scaling.md"
            conversion.ignore(f"{ACTOR}fsdp_config.{part}", text)


def _call(conversion: Conversion) -> None:
    """The arguments of the pipeline's call, and those that evaluations have in their place."""
    settings = conversion.settings
    path = conversion.recipe["model"]["path"]
    twice = bool(model_word(path, GUIDED_TWICE))
    video = bool(model_word(path, ["wan", "ltx", "hunyuanvideo"]))
    keys = ["height", "width", "max_sequence_length", *(["num_frames"] if video else [])]
    keys += ["frame_rate"] if model_word(path, ["ltx"]) else []
    for key in keys:
        value = settings.number(f"{PIPELINE}{key}") if key == "frame_rate" else settings.count(f"{PIPELINE}{key}")
        conversion.carry(f"{PIPELINE}{key}", f"model.call.{key}", value)
        own = f"{VALIDATION}pipeline.{key}"
        if settings.has(own) and settings.number(own) != settings.number(f"{PIPELINE}{key}"):
            conversion.carry(own, f"evaluate.call.{key}", settings.value(own))
        conversion.used(own)
    name = "true_cfg_scale" if twice else "guidance_scale"
    theirs = f"{PIPELINE}{name}"
    if model_word(path, ["wan"]) and settings.has(f"{PIPELINE}true_cfg_scale"):
        theirs = f"{PIPELINE}true_cfg_scale"
        if settings.value(f"{PIPELINE}guidance_scale") not in (None, settings.value(theirs)):
            text = "the loss reads true_cfg_scale there, which is taken; sampling reads this one"
            conversion.lose(f"{PIPELINE}guidance_scale", text)
        conversion.used(f"{PIPELINE}guidance_scale")
    scale = settings.number(theirs)
    # Without a scale, their SD3 has no guidance.
    conversion.carry(theirs, f"model.call.{name}", 1.0 if scale is None else scale)
    if twice and (scale or 0.0) > 1:
        conversion.follow("their prompts of Qwen-Image", "model.call.negative_prompt", " ")
    own = f"{VALIDATION}pipeline.{name}"
    if settings.has(own) and settings.number(own) != scale:
        conversion.carry(own, f"evaluate.call.{name}", settings.number(own))
    conversion.used(own)
    if model_word(path, ["wan"]):
        conversion.follow("the shift of their Wan", "sampler.shift", 5.0)
    if model_word(path, ["i2v"]) or "edit" in path.lower():
        conversion.want("the prompt file needs a column `image` with the path of a picture: see docs/own_model.md")


def _batches(conversion: Conversion) -> int:
    """Optimizer steps of an iteration. Their mini batch is a number of prompts."""
    settings = conversion.settings
    prompts, mini = settings.count("data.train_batch_size"), settings.count(f"{ACTOR}ppo_mini_batch_size")
    updates = max(min(prompts // mini, prompts), 1)
    note = "an update takes whole groups, there too" if updates > 1 else ""
    if mini > prompts or prompts % mini:
        note = f"{prompts} prompts in mini batches of {mini}, rounded"
    conversion.carry(f"{ACTOR}ppo_mini_batch_size", "optimizer.updates", updates, note)
    key = f"{ACTOR}ppo_micro_batch_size_per_gpu"
    if settings.value(key) is not None:
        conversion.carry(key, "rollout.batch", settings.count(key), "sampling too")
        conversion.carry(key, "rollout.decode_batch", settings.count(key))
    return updates


def _optimizer(conversion: Conversion, updates: int) -> None:
    settings, at = conversion.settings, f"{ACTOR}optim."
    betas = settings.pair(f"{at}betas")
    if betas is not None:
        conversion.carry(f"{at}betas", "optimizer.betas", list(betas))
    key = (
        f"{at}clip_grad"
        if settings.has(f"{at}clip_grad") and not settings.has(f"{ACTOR}grad_clip")
        else f"{ACTOR}grad_clip"
    )
    conversion.carry(key, "optimizer.max_grad_norm", settings.number(key))
    kind = settings.text(f"{at}lr_scheduler_type") or "constant"
    if kind in ("constant", "cosine"):
        conversion.carry(f"{at}lr_scheduler_type", "optimizer.schedule", kind)
    else:
        conversion.lose(f"{at}lr_scheduler_type", "optimizer.schedule is constant, linear, cosine or inverse")
    steps, share = settings.whole(f"{at}lr_warmup_steps") or 0, settings.number(f"{at}lr_warmup_steps_ratio") or 0.0
    total = settings.whole("trainer.total_training_steps") or 0
    if steps > 0:
        conversion.carry(f"{at}lr_warmup_steps", "optimizer.warmup", steps)
    elif share > 0 and total > 0:
        conversion.carry(f"{at}lr_warmup_steps_ratio", "optimizer.warmup", round(share * total * updates))
    elif share > 0:
        text = f"write optimizer.warmup: {share:g} times the number of all optimizer steps"
        conversion.lose(f"{at}lr_warmup_steps_ratio", text)
    conversion.used(f"{at}lr_warmup_steps", f"{at}lr_warmup_steps_ratio")
    conversion.follow("no average of the weights", "optimizer.ema", None)


def _rewards(conversion: Conversion) -> None:
    """The reward function, or several with their weights."""
    settings, notes = conversion.settings, list[str]()
    at = "reward.reward_functions."
    names = dict.fromkeys(key.removeprefix(at).split(".")[0] for key in settings.given if key.startswith(at))
    entries: list[dict[str, Any]] = []
    keys: list[str] = []
    for name in names:
        key = f"{at}{name}.path"
        stem = _stem(settings.text(key) or name)
        weight = settings.number(f"{at}{name}.weight")
        entries.append(entry_of(conversion, name, REWARDS.get(stem), 1.0 if weight is None else weight, notes))
        keys += [one for one in (key, f"{at}{name}.weight") if settings.has(one)]
    if not names:
        keys = ["reward.custom_reward_function.path"]
        stem = _stem(settings.text(keys[0]) or "reward")
        entries = [entry_of(conversion, stem, REWARDS.get(stem), 1.0, notes)]
        if not settings.has(keys[0]):
            conversion.follow("not in the script", "rewards", entries)
            return
    for number, entry in enumerate(entries):
        if entry["name"] in [other["name"] for other in entries[:number]]:
            entry["label"] = f"{entry['name'].rpartition(':')[2]}_{number + 1}"
    conversion.carry(keys, "rewards", entries, "; ".join(notes))
    if settings.text("reward.aggregation") != "weighted_sum":
        conversion.lose("reward.aggregation", "rewards are added up; `combine` has other ways, see docs/rewards.md")
    conversion.used("reward.aggregation")


def _stem(path: str) -> str:
    """The name of a Python file or module, without folders and ending."""
    return re.split(r"[/.]", path.removesuffix(".py").rstrip("/"))[-1]


def _data(conversion: Conversion, unsaid: Mapping[str, list[str]]) -> None:
    """The files of prompts. Theirs hold conversations, which only language models read here."""
    settings = conversion.settings
    evaluates = (settings.whole("trainer.test_freq") or -1) > 0
    for key, ours in (("data.train_files", "data.train"), ("data.val_files", "data.heldout")):
        if ours == "data.heldout" and not evaluates:
            conversion.carry(key, ours, None, "no evaluation; a file of held-out prompts shows what a run gains")
            continue
        listed = settings.texts(key) or []
        if len(listed) != 1:
            why = f"{', '.join(unsaid.get(key, []))[:80]} says it there" if key in unsaid else "not one file"
            conversion.follow(why, ours, f"prompts/{ours.removeprefix('data.')}.jsonl")
            conversion.want(f"{key}: {why}; write the file of prompts as {ours}")
            continue
        # The home folder is no part of a recipe.
        path = posixpath.normpath(listed[0].removeprefix("~/"))
        if path.endswith(".parquet"):
            path = f"{path.removesuffix('.parquet')}.jsonl"
            text = (
                f"its column `prompt` holds conversations; write the words of the last message as `prompt` into {path}"
            )
            conversion.lose(key, f"{text}, one JSON object a line, beside the columns that rewards read")
        conversion.carry(key, ours, path)


def _evaluation(conversion: Conversion) -> None:
    settings = conversion.settings
    every = settings.whole("trainer.test_freq") or -1
    steps = f"{VALIDATION}pipeline.num_inference_steps"
    if every > 0:
        conversion.carry("trainer.test_freq", "evaluate.every", every)
        conversion.carry(steps, "evaluate.steps", settings.count(steps))
        conversion.carry(f"{VALIDATION}n", "evaluate.seeds", settings.count(f"{VALIDATION}n"))
        most = settings.whole("data.val_max_samples") or -1
        if most > 0:
            conversion.carry("data.val_max_samples", "evaluate.prompts", most)
    elif settings.has("trainer.test_freq"):
        conversion.ignore("trainer.test_freq", "no evaluation")


def _length(conversion: Conversion) -> None:
    settings = conversion.settings
    steps, epochs = settings.whole("trainer.total_training_steps"), settings.whole("trainer.total_epochs")
    if steps is not None:
        conversion.carry("trainer.total_training_steps", "run.iterations", steps)
    else:
        prompts = conversion.recipe["rollout"]["prompts"]
        text = (
            f"write run.iterations: {epochs} × the number of training prompts / {prompts}; {LENGTH} stands in its place"
        )
        conversion.lose("trainer.total_epochs", text)
        conversion.follow("to be written", "run.iterations", LENGTH)
    every = settings.whole("trainer.save_freq") or -1
    if every > 0:
        conversion.carry("trainer.save_freq", "run.checkpoint_every", every)
    elif settings.has("trainer.save_freq"):
        conversion.ignore("trainer.save_freq", "a run always keeps checkpoints; run.checkpoint_every says how often")
    logger = settings.value("trainer.logger")
    sent = [name for name in (logger if isinstance(logger, list) else [logger]) if name not in (None, "console")]
    if sent:
        text = f"write run.trackers: [{', '.join(str(name)[:20] for name in sent)}]; wandb sends the metrics there"
        conversion.lose("trainer.logger", text)
    if short(str(settings.value("trainer.v1.trainer_mode"))) == "'separate_async'":
        conversion.lose("trainer.v1.trainer_mode", "sampling and training take turns here, and weights are never old")
