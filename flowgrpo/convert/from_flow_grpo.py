"""A configuration of flow_grpo as a recipe. Much is in the training script alone: see `flow_grpo_scripts.py`."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .conversion import Conversion, Remark
from .flow_grpo_keys import IDLE, MISSING, ROWS
from .flow_grpo_scripts import Script, script_of
from .foreign_settings import ForeignSettings, named
from .python_config import ConfigReader
from .python_source import config_functions
from .python_values import Unread
from .reward_names import OF_FLOW_GRPO, entry_of

WHOLE = frozenset({"reward_fn", "prompt_fn_kwargs"})
GPUS = ("gpu_number", "num_gpus", "n_gpus", "gpus")
"""Variables that a function of flow_grpo calls the number of processes."""
ENDLESS = 100_000
"""Their number of epochs where a run is meant to be stopped by hand."""
LENGTH = 1_000
"""Iterations of a recipe whose run has no end there."""


def from_flow_grpo(path: Path, function: str | None, gpus: int | None) -> Conversion:
    """Convert a function of a configuration file.

    Args:
        path: a Python file, such as config/grpo.py.
        function: the configuration; None if the file has only one.
        gpus: number of their processes; None for the number that the function names.

    Raises:
        ValueError: the file cannot be read, it has no such function, or a value has a wrong type.
    """
    reader = ConfigReader(path)
    function = _chosen(reader, path, function)
    found = reader.read(function)
    values, files = found.flat(WHOLE)
    readable = {key: value for key, value in values.items() if not isinstance(value, Unread)}
    conversion = Conversion(ForeignSettings(readable, {}, f"{path}:{function}"), function)
    for key in values.keys() - readable.keys():
        text = "only a run of the file would show this value; write the value into the file, and convert it again"
        conversion.lost.append(Remark(f"{named(key)} {values[key]!r}", text))
    own = {key for key, file in files.items() if file != "base.py"}
    named_there = (reader.variables[name] for name in GPUS if type(reader.variables.get(name)) is int)
    _convert(conversion, own, gpus or next(named_there, None))
    return conversion


def _chosen(reader: ConfigReader, path: Path, function: str | None) -> str:
    known = config_functions(reader.main)
    if function is not None or len(known) == 1:
        return function or known[0]
    if not known:
        raise ValueError(f"{path} has no function that returns a configuration")
    raise ValueError(
        f"{path} has several configurations; name one, such as {path}:{known[-1]}. It has {', '.join(known)}"
    )


def _convert(conversion: Conversion, own: set[str], gpus: int | None) -> None:
    settings = conversion.settings
    algorithm = settings.text("train.algorithm") or "grpo"
    if algorithm != "grpo":
        raise ValueError(
            f"{settings.place}: train.algorithm is {algorithm!r:.40}, and only configurations of GRPO are converted; "
            "`flowgrpo recipes` lists other methods, such as flow_dpo"
        )
    script = script_of(settings, own)
    fast = ("flow_grpo_fast@published", "flow_grpo_fast") if script.fast else ()
    conversion.bases = (*fast, "flow_grpo@published", "flow_grpo")
    conversion.carry_rows(ROWS)
    _model(conversion, script)
    _call(conversion, script)
    _sampler(conversion, script)
    _batches(conversion, gpus)
    _comparison(conversion, script)
    _objective(conversion, script)
    _rewards(conversion)
    _data(conversion)
    _length(conversion)
    conversion.lose_rows(MISSING)
    conversion.finish(IDLE)


def _model(conversion: Conversion, script: Script) -> None:
    settings = conversion.settings
    precision = settings.text("mixed_precision") or "fp16"
    dtype = {"fp16": "float16", "bf16": "bfloat16", "no": "float32"}.get(precision)
    if dtype is None:
        raise settings.wrong("mixed_precision", "fp16, bf16 or no")
    conversion.carry("mixed_precision", "model.dtype", dtype)
    lora = settings.flag("use_lora")
    conversion.carry("use_lora", "model.train", "lora" if lora else "full")
    start = settings.text("train.lora_path")
    if lora and start is not None:
        conversion.carry("train.lora_path", "model.lora.start", start, "the LoRA gives rank, alpha and layers")
    elif lora:
        conversion.follow(script.name, "model.lora.rank", script.rank)
        conversion.follow(script.name, "model.lora.alpha", script.alpha)
        if script.targets is not None:
            conversion.follow(script.name, "model.lora.targets", list(script.targets))
    conversion.used("train.lora_path")


def _call(conversion: Conversion, script: Script) -> None:
    """The arguments of the pipeline's call: size and guidance, and what their script gives it."""
    settings = conversion.settings
    if script.call is None:
        text = f"{script.model} is no pipeline of diffusers, so it cannot be trained here; give another model.path"
        conversion.lose("pretrained.model", text)
        conversion.used("sample.guidance_scale")
    for theirs, ours in script.call or ():
        if "guidance" in theirs and (value := settings.number(theirs)) is not None:
            conversion.carry(theirs, f"model.call.{ours}", value)
        elif "guidance" not in theirs and settings.value(theirs) is not None:
            conversion.carry(theirs, f"model.call.{ours}", settings.count(theirs))
    for ours, fixed in script.always.items():
        conversion.follow(script.name, f"model.call.{ours}", fixed)
    if script.pictures:
        conversion.want("the prompt file needs a column `image` with a picture for each prompt: see docs/own_model.md")
    guidance = settings.number("sample.guidance_scale") or 1.0
    if settings.has("train.cfg") and not settings.flag("train.cfg") and guidance > 1:
        conversion.lose("train.cfg", "training has the guidance of sampling here; a guidance of 1 is none")
    other = settings.number("sample.eval_guidance_scale")
    if script.fast and not script.kernel and other is not None and other != guidance:
        for theirs, ours in script.call or ():
            if "guidance" in theirs:
                conversion.carry("sample.eval_guidance_scale", f"evaluate.call.{ours}", other)


def _sampler(conversion: Conversion, script: Script) -> None:
    settings = conversion.settings
    if script.kernel:
        conversion.follow(script.name, "sampler.kernel", {"name": script.kernel})
        if settings.has("sample.noise_level"):
            conversion.ignore("sample.noise_level", f"{script.name} has a noise of its own")
    else:
        kind = (settings.text("sample.sde_type") or "sde") if script.fast else "sde"
        if kind not in ("sde", "cps"):
            raise settings.wrong("sample.sde_type", "sde or cps")
        theirs = [
            "sample.noise_level",
            *(["sample.sde_type"] if script.fast and settings.has("sample.sde_type") else []),
        ]
        eta = settings.number("sample.noise_level")
        name = "cps" if kind == "cps" else "flow_sde"
        conversion.carry(theirs, "sampler.kernel", {"name": name, "eta": 0.7 if eta is None else eta})
    conversion.follow(script.name, "sampler.plan.name", "window")
    if settings.has("sample.train_num_steps"):
        _branching_window(conversion)
        return
    same = settings.flag("sample.same_latent")
    conversion.carry("sample.same_latent", "sampler.plan.shared_noise", same)
    if script.fast:
        _window(conversion)
    else:
        _fraction(conversion)


def _window(conversion: Conversion) -> None:
    """The script draws the first step of a window for each call; the steps outside are deterministic."""
    settings, steps = conversion.settings, conversion.settings.count("sample.num_steps")
    size = settings.whole("sample.sde_window_size") or 0
    first, last = settings.pair("sample.sde_window_range") or (0.0, float(steps))
    if size == 0:
        conversion.carry("sample.sde_window_size", "sampler.plan.window", {"name": "all"}, "all steps but the last")
        conversion.used("sample.sde_window_range")
        return
    stop = min(int(last), steps - 1)
    note = (
        "drawn once for all processes; the last step is never trained"
        if last > stop
        else "drawn once for all processes"
    )
    window = {"name": "random", "size": size, "interval": 1, "start": int(first), "stop": stop}
    conversion.carry(["sample.sde_window_size", "sample.sde_window_range"], "sampler.plan.window", window, note)


def _branching_window(conversion: Conversion) -> None:
    """The earlier form of Flow-GRPO-Fast: a group branches at the window from one deterministic beginning."""
    settings, steps = conversion.settings, conversion.settings.count("sample.num_steps")
    size = settings.count("sample.train_num_steps")
    stop = min(steps // 2 + size, steps - 1)
    window = {"name": "random", "size": size, "interval": 1, "start": 0, "stop": stop}
    conversion.carry("sample.train_num_steps", "sampler.plan.window", window, "drawn once for all processes")
    conversion.follow("a group branches from one noise", "sampler.plan.shared_noise", True)
    conversion.used("sample.same_latent")


def _fraction(conversion: Conversion) -> None:
    """Without a window, every step is stochastic, and the first steps are trained."""
    settings, steps = conversion.settings, conversion.settings.count("sample.num_steps")
    fraction = settings.number("train.timestep_fraction")
    trained = int(steps * (1.0 if fraction is None else fraction))
    keys = ["sample.num_steps", "train.timestep_fraction"]
    if trained >= steps - 1:
        note = "the last step is deterministic and not trained here; there it is stochastic"
        conversion.carry(keys, "sampler.plan.window", {"name": "all"}, note)
    else:
        window = {"name": "frozen", "size": max(trained, 1), "start": 0}
        conversion.carry(keys, "sampler.plan.window", window, f"the first {trained} steps are trained")
        conversion.follow("every step is stochastic", "sampler.plan.stochastic", "all")


def _batches(conversion: Conversion, gpus: int | None) -> None:
    """Prompts and optimizer steps of an iteration, from the batches of all processes."""
    settings, many = conversion.settings, gpus or 1
    if gpus is None:
        conversion.want(
            "the file does not say on how many GPUs it ran; say it with --gpus, since it decides rollout.prompts"
        )
    batch, batches = settings.count("sample.train_batch_size"), settings.count("sample.num_batches_per_epoch")
    again = settings.count("sample.sample_time_per_prompt") if settings.has("sample.sample_time_per_prompt") else 1
    keys = ["sample.train_batch_size", "sample.num_batches_per_epoch"]
    if settings.has("sample.mini_num_image_per_prompt"):
        group = mini = settings.count("sample.mini_num_image_per_prompt")
        prompts, note = batch * batches * many, f"{batch} × {batches} batches × {many} GPUs"
        conversion.carry(keys, "rollout.prompts", prompts, note)
        conversion.carry("sample.mini_num_image_per_prompt", "rollout.group", group)
        conversion.ignore("sample.num_image_per_prompt", "a group is the branches of one beginning")
        batch = mini
    else:
        images, each = batch * batches * many, settings.count("sample.num_image_per_prompt")
        prompts = max(round(images / each), 1)
        note = f"{batch} × {batches} batches × {many} GPUs / {each} images" + (
            "" if images == prompts * each else ", rounded"
        )
        conversion.carry([*keys, "sample.num_image_per_prompt"], "rollout.prompts", prompts, note)
        conversion.carry("sample.num_image_per_prompt", "rollout.group", each * again)
        conversion.used("sample.sample_time_per_prompt")
    key = "sample.mini_num_image_per_prompt" if settings.has("sample.mini_num_image_per_prompt") else keys[0]
    conversion.carry(key, "rollout.batch", batch)
    conversion.carry(key, "rollout.decode_batch", batch)
    accumulated = max(settings.whole("train.gradient_accumulation_steps") or 1, 1)
    updates = max(batches * again // accumulated, 1)
    note = "an update takes whole groups here, and a random share of the samples there"
    keys = ["sample.num_batches_per_epoch", "train.gradient_accumulation_steps"]
    conversion.carry(keys, "optimizer.updates", min(updates, prompts), note)


def _comparison(conversion: Conversion, script: Script) -> None:
    settings = conversion.settings
    scale = "batch" if settings.flag("sample.global_std") else "group"
    conversion.carry("sample.global_std", "advantage", {"name": "group", "scale": scale, "ddof": 0, "eps": 1e-4})
    if script.drops_equal:
        conversion.follow(f"{script.name} leaves samples without an advantage out", "select", ["varied"])
    if settings.has("per_prompt_stat_tracking") and not settings.flag("per_prompt_stat_tracking"):
        conversion.lose("per_prompt_stat_tracking", "samples are compared with the samples of their prompt here")
    betas = [settings.number("train.adam_beta1"), settings.number("train.adam_beta2")]
    if None not in betas:
        conversion.carry(["train.adam_beta1", "train.adam_beta2"], "optimizer.betas", betas)
    if settings.flag("train.use_8bit_adam"):
        conversion.carry("train.use_8bit_adam", "optimizer.type", "adamw_8bit")
    conversion.used("train.use_8bit_adam")
    average = {"decay": 0.9, "every": 8} if settings.flag("train.ema") else None
    conversion.carry("train.ema", "optimizer.ema", average, f"its numbers are in {script.name}" if average else "")


def _objective(conversion: Conversion, script: Script) -> None:
    """A clip bounds the mean log-ratio over the elements of a latent, here and there. Their KL has another unit."""
    settings = conversion.settings
    cps = conversion.recipe["sampler"]["kernel"]["name"] == "cps"
    clip = settings.number("train.clip_range")
    objective: dict[str, Any] = {"name": "transition", "ratio": "gaussian", "weight": "none"}
    note, keys = "", ["train.clip_range"]
    if settings.flag("rationorm"):
        conversion.bases = ("grpo_guard@published", "grpo_guard")
        objective |= {"ratio": "guard", "weight": "guard"}
        note, keys = "the weight of a step is 1 over its Jacobian; there it is 1 over its size", [*keys, "rationorm"]
    elif cps:
        conversion.bases = ("flow_cps_released@published", "flow_cps_released")
        objective["ratio"] = "cps_released"
        note = "the ratio of their log-probability, which is not a density"
    conversion.carry(keys, "objective", {**objective, "surrogate": {"name": "clip", "low": clip, "high": clip}}, note)
    conversion.used("rationorm")
    beta, steps = settings.number("train.beta") or 0.0, settings.count("sample.num_steps")
    exact = cps or script.kernel == "wan_sde"
    weight = beta if exact else float(f"{beta / steps:.6g}")
    note = (
        ""
        if exact or beta <= 0
        else f"beta / {steps}: their KL lacks a division by the step size, 1/{steps} on average"
    )
    conversion.carry("train.beta", "penalties", [{"name": "kl", "weight": weight}] if beta > 0 else [], note)


def _rewards(conversion: Conversion) -> None:
    given = conversion.settings.value("reward_fn")
    entries: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, weight in given.items() if isinstance(given, Mapping) else ():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            conversion.want(f"reward {named(str(name))}: its weight {weight!r:.40} is no number; 1 was taken")
            weight = 1.0
        entry = entry_of(conversion, str(name), OF_FLOW_GRPO.get(str(name)), float(weight), notes)
        entries.append(entry)
    if not entries:
        entries.append(entry_of(conversion, "reward", None, 1.0, notes))
    conversion.carry("reward_fn", "rewards", entries, "; ".join(notes))


def _data(conversion: Conversion) -> None:
    folder = conversion.settings.text("dataset") or "dataset"
    metadata = conversion.settings.text("prompt_fn") == "geneval"
    names = ("train_metadata.jsonl", "test_metadata.jsonl") if metadata else ("train.txt", "test.txt")
    for name, ours in zip(names, ("data.train", "data.heldout")):
        conversion.carry("dataset", ours, posixpath.join(folder, name))


def _length(conversion: Conversion) -> None:
    epochs = conversion.settings.whole("num_epochs")
    if epochs is not None and epochs < ENDLESS:
        conversion.carry("num_epochs", "run.iterations", epochs)
        return
    note = "their run goes on until it is stopped; `flowgrpo resume RUN run.iterations=N` makes a run longer"
    conversion.follow("no end", "run.iterations", LENGTH, note)
    conversion.used("num_epochs")
