"""A configuration of Flow-Factory as a recipe: model, batches, data. `flow_factory_methods.py` has the algorithms."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .conversion import Conversion
from .flow_factory_keys import CALL, DEFAULTS, IDLE, LAYERS, MISSING, OF_METHOD, PICTURES, ROWS
from .flow_factory_methods import average_of, guidance_name, method, steps_of
from .flow_grpo_scripts import model_word
from .foreign_settings import ForeignSettings, named
from .from_flow_grpo import LENGTH
from .reward_names import OF_FLOW_FACTORY, entry_of

LISTS = ("rewards", "eval_rewards")
SECTIONS = ("data", "model", "scheduler", "train", "eval", "log")


def from_flow_factory(path: Path, given: Mapping[str, Any], gpus: int | None) -> Conversion:
    """Convert a configuration file.

    Args:
        path: of the file.
        given: what the file holds.
        gpus: number of their processes; None for `num_processes` of the file.

    Raises:
        ValueError: a value has a wrong type, or the algorithm has no counterpart here.
    """
    flat: dict[str, Any] = {}
    for section, value in given.items():
        if isinstance(value, dict) and section not in LISTS:
            flat |= {f"{section}.{key}": inner for key, inner in value.items()}
        elif (section in SECTIONS and value is not None) or (section in LISTS and isinstance(value, int | float | str)):
            what = "a list of rewards" if section in LISTS else "a mapping of its keys"
            raise ForeignSettings(given, {}, str(path)).wrong(section, what)
        else:
            flat[section] = value
    if isinstance(flat.get("train.trainer_type"), str):
        flat["train.trainer_type"] = flat["train.trainer_type"].lower()
    algorithm = str(flat.get("train.trainer_type"))
    settings = ForeignSettings(flat, DEFAULTS | OF_METHOD.get(algorithm, {}), str(path))
    conversion = Conversion(settings, settings.text("log.run_name") or path.stem)
    conversion.carry_rows(ROWS)
    _model(conversion)
    _call(conversion)
    many = gpus or (settings.count("num_processes") if settings.has("num_processes") else 1)
    updates = _batches(conversion, many)
    steps_of(conversion)
    method(conversion, updates)
    _comparison(conversion)
    _average(conversion, updates)
    _rewards(conversion)
    _data(conversion)
    _run(conversion)
    conversion.lose_rows(MISSING)
    conversion.finish(IDLE, _advice)
    return conversion


def _advice(key: str) -> str:
    """What to do about a key that is not known."""
    section, dot, _ = key.partition(".")
    if dot and section in ("train", "eval"):
        return "if it is an argument of the pipeline's call, write it into model.call"
    if dot and section in SECTIONS:
        return "look up what it does there"
    known = {*DEFAULTS, *(row.theirs for row in (*ROWS, *MISSING)), *IDLE}
    meant = [f"{one}.{key}" for one in SECTIONS if f"{one}.{key}" in known]
    # Their program keeps such a key, and says that it may be a misspelling.
    return f"it stands outside the sections of the file; {_moved(meant)}"


def _moved(meant: list[str]) -> str:
    if meant:
        return f"if it means {' or '.join(meant)}, move it there, and convert the file again"
    return f"the sections are {', '.join((*SECTIONS, *LISTS))}"


def _model(conversion: Conversion) -> None:
    settings = conversion.settings
    dtype = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}.get(str(settings.value("mixed_precision")))
    if dtype is None:
        raise settings.wrong("mixed_precision", "bf16, fp16 or no")
    conversion.carry("mixed_precision", "model.dtype", dtype)
    kind = settings.text("model.finetune_type")
    if kind not in ("lora", "full"):
        raise settings.wrong("model.finetune_type", "lora or full")
    conversion.carry("model.finetune_type", "model.train", kind)
    if kind == "lora":
        rank = settings.count("model.lora_rank")
        conversion.carry("model.lora_rank", "model.lora.rank", rank)
        alpha = settings.number("model.lora_alpha")
        note = "twice the rank, their default" if alpha is None else ""
        conversion.carry("model.lora_alpha", "model.lora.alpha", alpha or 2.0 * rank, note)
        _layers(conversion)
    elif (settings.texts("model.target_modules") or ["all"]) != ["all"]:
        conversion.lose(
            "model.target_modules",
            "model.train full trains all weights of the denoiser, and there only these layers "
            "are trained; write model.train: lora, or train all",
        )
    conversion.used("model.target_modules", "model.lora_rank", "model.lora_alpha")
    components = settings.texts("model.target_components") or ["transformer"]
    experts = bool(model_word(settings.text("model.model_name_or_path") or "", ["wan2.2"]))
    if set(components) != ({"transformer", "transformer_2"} if experts else {"transformer"}):
        conversion.lose("model.target_components", "every denoiser of the pipeline is trained, and nothing else")
    conversion.used("model.target_components")
    attention = settings.text("model.attn_backend")
    if attention is not None and "hub" in attention.lower():
        text = "it would run code that is fetched from the hub; write model.attention yourself, if you want that"
        conversion.lose("model.attn_backend", text)
    elif attention is not None:
        conversion.carry("model.attn_backend", "model.attention", attention)
    if settings.flag("train.offload_samples_to_cpu"):
        conversion.carry("train.offload_samples_to_cpu", "rollout.store", "host")
    conversion.used("train.offload_samples_to_cpu", "model.attn_backend")


def _layers(conversion: Conversion) -> None:
    """The layers of the LoRA: a list, or their `default` for the type of the model."""
    settings = conversion.settings
    given, kind = settings.texts("model.target_modules") or ["all"], str(settings.value("model.model_type")).lower()
    if given == ["default"] and kind in LAYERS:
        layers = LAYERS[kind]
        note = "the attention projections" if layers is None else ""
        keys = ["model.target_modules", "model.model_type"]
        conversion.carry(keys, "model.lora.targets", None if layers is None else list(layers), note)
    elif given in (["default"], ["all"]):
        text = "the attention projections are taken; name other layers in model.lora.targets"
        conversion.lose(["model.target_modules", "model.model_type"], text)
    else:
        conversion.carry("model.target_modules", "model.lora.targets", given)


def _call(conversion: Conversion) -> None:
    settings = conversion.settings
    for side, key in enumerate(("train.height", "train.width")):
        own = settings.value(key) is not None
        size = settings.count(key) if own else _side(settings, "train.resolution", side)
        conversion.carry(key if own else "train.resolution", f"model.call.{key[6:]}", size)
    name = guidance_name(conversion)
    conversion.carry("train.guidance_scale", f"model.call.{name}", settings.number("train.guidance_scale"))
    if name == "true_cfg_scale" and not settings.has("train.negative_prompt"):
        conversion.follow("their adapter for Qwen-Image", "model.call.negative_prompt", " ")
    for key in CALL:
        value = settings.value(f"train.{key}")
        if isinstance(value, bool | int | float | str):
            conversion.carry(f"train.{key}", f"model.call.{key}", value)
        conversion.used(f"train.{key}")
    for key in ("resolution", "height", "width", "guidance_scale", *CALL):
        theirs, evaluated = f"train.{key}", settings.value(f"eval.{key}")
        if evaluated is not None and evaluated != settings.value(theirs):
            _evaluated(conversion, key, name)
        conversion.used(f"eval.{key}", theirs)
    if any(word in str(settings.value("model.model_type")).lower() for word in PICTURES):
        conversion.want("the prompt file needs a column `image` with the path of a picture: see docs/own_model.md")


def _evaluated(conversion: Conversion, key: str, guidance: str) -> None:
    """Carry over a key of `eval` that differs from `train`; `guidance` is the call's argument of this meaning."""
    settings, theirs = conversion.settings, f"eval.{key}"
    if key == "resolution":
        for side, ours in enumerate(("height", "width")):
            if settings.value(f"eval.{ours}") is None:
                conversion.carry(theirs, f"evaluate.call.{ours}", _side(settings, theirs, side))
    elif key in ("height", "width"):
        conversion.carry(theirs, f"evaluate.call.{key}", settings.count(theirs))
    elif key == "guidance_scale":
        conversion.carry(theirs, f"evaluate.call.{guidance}", settings.number(theirs))
    else:
        conversion.carry(theirs, f"evaluate.call.{key}", settings.value(theirs))


def _side(settings: ForeignSettings, key: str, side: int) -> int:
    """Height (0) or width (1) of a resolution: one number, or a list of them."""
    value = settings.value(key)
    sides = list(value) if isinstance(value, list | tuple) else [value]
    inner = ForeignSettings({key: sides[min(side, len(sides) - 1)] if sides else 512}, {}, settings.place)
    return inner.count(key)


def _batches(conversion: Conversion, many: int) -> int:
    """Prompts and optimizer steps of an iteration; returns the optimizer steps."""
    settings = conversion.settings
    batch, group = settings.count("train.per_device_batch_size"), settings.count("train.group_size")
    asked, share = settings.count("train.unique_sample_num_per_epoch"), many * batch
    auto = settings.value("train.gradient_accumulation_steps") == "auto"
    updates = settings.count("train.gradient_step_per_epoch") if auto else 1
    prompts = _aligned(settings, asked, group, many, batch, updates if auto else 1)
    note = "" if prompts == asked else f"rounded up for {many} processes of {batch} images, as there"
    conversion.carry("train.unique_sample_num_per_epoch", "rollout.prompts", prompts, note)
    forward = settings.text("train.trainer_type") not in ("grpo", "grpo-guard")
    if settings.text("train.trainer_type") == "dgpo" and (group % many or share % group):
        conversion.want(f"DGPO raises group_size there to fit {many} processes of {batch} images; here it is {group}")
    size = max(batch, group) if forward else batch
    note = "a loss of the forward process takes whole groups" if size != batch else ""
    conversion.carry("train.per_device_batch_size", "rollout.batch", size, note)
    conversion.carry("train.per_device_batch_size", "rollout.decode_batch", batch)
    key = "train.gradient_step_per_epoch"
    if not auto:
        key, passes = "train.gradient_accumulation_steps", prompts * group // max(share, 1) * _timesteps(settings)
        updates = max(passes // settings.count(key), 1)
    conversion.used("train.gradient_accumulation_steps", "train.gradient_step_per_epoch")
    note = "an update takes whole groups here, and a random share of the samples there"
    conversion.carry(key, "optimizer.updates", min(updates, prompts), note if updates > 1 else "")
    return min(updates, prompts)


def _timesteps(settings: ForeignSettings) -> int:
    key = "train.num_train_timesteps" if settings.has("train.num_train_timesteps") else "scheduler.num_sde_steps"
    return max(settings.whole(key) or settings.count("train.num_inference_steps") - 1, 1)


def _aligned(settings: ForeignSettings, asked: int, group: int, many: int, batch: int, updates: int) -> int:
    """The number of prompts to which they round up, so that batches of all processes and updates come out even."""
    share = many * batch
    step = share // math.gcd(group, share) * updates
    scattered = settings.text("data.sampler_type") == "distributed_k_repeat"
    if settings.text("data.sampler_type") == "auto":
        scattered = asked % many != 0 and (asked // many * group) % batch == 0
    step = step if scattered else math.lcm(step, many)
    return -(-asked // step) * step


def _comparison(conversion: Conversion) -> None:
    settings = conversion.settings
    kind = settings.text("train.advantage_aggregation")
    if kind not in ("sum", "gdpo"):
        raise settings.wrong("train.advantage_aggregation", "sum or gdpo")
    if kind == "gdpo":
        advantage: dict[str, Any] = {"name": "gdpo", "scale": "group", "ddof": 0, "eps": 1e-6}
        conversion.carry("train.advantage_aggregation", "advantage", advantage)
    else:
        scale = "batch" if settings.flag("train.global_std") else "group"
        advantage = {"name": "group", "scale": scale, "ddof": 0, "eps": 1e-6}
        conversion.carry(["train.advantage_aggregation", "train.global_std"], "advantage", advantage)
    low, high = settings.pair("train.adv_clip_range") or (-5.0, 5.0)
    note = "" if low == -high else "the bound is the same on both sides here"
    conversion.carry("train.adv_clip_range", "clamp", high, note)
    betas = settings.pair("train.adam_betas")
    if betas is not None:
        conversion.carry("train.adam_betas", "optimizer.betas", list(betas))


def _average(conversion: Conversion, updates: int) -> None:
    keys = [f"train.{key}" for key in ("ema_decay", "ema_update_interval", "ema_decay_schedule")]
    note = "their interval is of iterations, ours of optimizer steps" if updates > 1 else ""
    conversion.carry(keys, "optimizer.ema", average_of(conversion, updates), note)


def _rewards(conversion: Conversion) -> None:
    trained, notes = _listed(conversion, "rewards")
    conversion.carry("rewards", "rewards", trained, notes)
    if conversion.settings.value("eval_rewards"):
        before = len(conversion.lost)
        evaluated, notes = _listed(conversion, "eval_rewards")
        if [_without_batch(entry) for entry in evaluated] == [_without_batch(entry) for entry in trained]:
            del conversion.lost[before:]
            conversion.ignore("eval_rewards", "evaluations take the training rewards")
        else:
            conversion.carry("eval_rewards", "evaluate.rewards", evaluated, notes)


def _without_batch(entry: dict[str, Any]) -> dict[str, Any]:
    return entry | {"options": {k: v for k, v in entry.get("options", {}).items() if k != "batch_size"}}


def _listed(conversion: Conversion, key: str) -> tuple[list[dict[str, Any]], str]:
    given = conversion.settings.value(key)
    rows = [given] if isinstance(given, dict) else given if isinstance(given, list) else []
    notes: list[str] = []
    entries: list[dict[str, Any]] = []
    for row in rows or [{}]:
        inner = ForeignSettings(
            row if isinstance(row, dict) else {}, {"weight": 1.0}, f"{conversion.settings.place}: {key}"
        )
        name = inner.text("reward_model") or inner.text("name") or "reward"
        entry = entry_of(conversion, name, OF_FLOW_FACTORY.get(name.lower()), inner.number("weight") or 0.0, notes)
        if inner.has("batch_size") and entry["name"] in ("pickscore", "clip_score"):
            entry["options"]["batch_size"] = inner.count("batch_size")
        if inner.has("model_name_or_path") and entry["name"] == "clip_score":
            entry["options"]["model"] = inner.text("model_name_or_path")
        if entry["name"] in [other["name"] for other in entries]:
            entry["label"] = f"{entry['name'].rpartition(':')[2]}_{len(entries) + 1}"
        if (other := inner.text("dtype")) not in (None, "float32"):
            notes.append(f"{named(name)}: it scores in float32, not in {named(str(other))}")
        entries.append(entry)
    return entries, "; ".join(notes)


def _data(conversion: Conversion) -> None:
    """Their loader takes train.jsonl and test.jsonl of a folder, or else train.txt and test.txt."""
    folder = conversion.settings.text("data.dataset_dir") or "data"
    splits = [("train", "data.train"), ("test", "data.heldout")]
    for split, ours in splits if (conversion.settings.whole("eval.eval_freq") or 0) > 0 else splits[:1]:
        names = [posixpath.join(folder, f"{split}.{ending}") for ending in ("jsonl", "txt")]
        found = next((name for name in names if Path(name).is_file()), None)
        note = "" if found else f"{names[0]} if there is one; neither is here now"
        conversion.carry("data.dataset_dir", ours, found or names[1], note)


def _run(conversion: Conversion) -> None:
    settings = conversion.settings
    epochs = settings.whole("train.max_epochs")
    if epochs is not None and epochs > 0:
        conversion.carry("train.max_epochs", "run.iterations", epochs)
    else:
        note = "their run goes on until it is stopped; `flowgrpo resume RUN run.iterations=N` makes a run longer"
        conversion.follow("no end", "run.iterations", LENGTH, note)
        conversion.used("train.max_epochs")
    every = settings.whole("eval.eval_freq") or 0
    if every > 0:
        conversion.carry("eval.eval_freq", "evaluate.every", every)
    else:
        conversion.carry("eval.eval_freq", "data.heldout", None, "no evaluation")
    saved = settings.whole("log.save_freq") or 0
    if saved > 0:
        conversion.carry("log.save_freq", "run.checkpoint_every", saved)
    elif settings.has("log.save_freq"):
        conversion.ignore("log.save_freq", "a run always keeps checkpoints; run.checkpoint_every says how often")
    conversion.used("log.save_freq")
