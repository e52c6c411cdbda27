"""A configuration of TRL for a trainer that samples, as a recipe.

It is a YAML file as `trl grpo --config` takes it, or the JSON of `training_args`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configs.prompt_source import HUB
from .conversion import Conversion, PlainRow
from .foreign_settings import ForeignSettings
from .reward_names import OF_TRL, entry_of
from .trl_keys import DEFAULTS, IDLE, MISSING, ROWS
from .trl_losses import comparison, objective
from .trl_settings import every, length_settings, model_settings, optimizer_settings

PROMPTS = ("prompts/train.jsonl", "prompts/heldout.jsonl")
ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt")


@dataclass(frozen=True)
class TrlTrainer:
    """What a trainer of TRL has of its own.

    Attributes:
        what: the name of its configuration, for the list of what was carried over.
        defaults: what its configuration has where the file says nothing.
        bases: recipes on which the recipe may build.
        method: puts the comparison, the loss and the rewards into the recipe.
        idle: pattern of keys -> why they have no effect here; before the reasons that all trainers share.
        length: its key for the longest completion.
        others: how to say that a file is for another trainer; empty if a file of this one cannot be mistaken.
    """

    what: str
    defaults: Mapping[str, Any]
    bases: tuple[str, ...]
    method: Callable[[Conversion], None]
    idle: Mapping[str, str]
    length: str = "max_completion_length"
    others: str = ""


def from_trl(path: Path, given: Mapping[str, Any], gpus: int | None, trainer: TrlTrainer) -> Conversion:
    """Convert a configuration file.

    Args:
        path: of the file.
        given: what the file holds.
        gpus: number of their processes; None if it is not known, and 1 is taken.
        trainer: the trainer that it is for.

    Raises:
        ValueError: a value has a wrong type.
    """
    settings = ForeignSettings(given, trainer.defaults, str(path))
    conversion = Conversion(settings, settings.text("run_name") or path.stem)
    conversion.bases = trainer.bases
    conversion.follow(f"read as {trainer.what}", "task", "text", trainer.others)
    conversion.carry_rows((*ROWS, PlainRow(trainer.length, "generation.max_tokens", "count")))
    if settings.value(trainer.length) is None:
        conversion.lose(trainer.length, "write generation.max_tokens: a completion has a bound here")
    if settings.value("max_prompt_length") is None and settings.has("max_prompt_length"):
        conversion.ignore("max_prompt_length", "generation.max_prompt_tokens is the bound of a prompt")
    model_settings(conversion)
    _generation(conversion)
    updates = _batches(conversion, gpus)
    trainer.method(conversion)
    optimizer_settings(conversion)
    length_settings(conversion, updates)
    _evaluation(conversion, updates)
    _data(conversion)
    conversion.lose_rows(MISSING)
    engine = {"vllm_*": "vLLM's own value; generation.engine_options takes another"}
    conversion.finish({**trainer.idle, **(IDLE | engine if settings.flag("use_vllm") else IDLE)})
    return conversion


def _grpo(conversion: Conversion) -> None:
    comparison(conversion)
    objective(conversion)
    _correction(conversion)
    reward_settings(conversion)


GRPO = TrlTrainer(
    "a GRPOConfig", DEFAULTS, ("text",), _grpo, {},
    others="an RLOOConfig has normalize_advantages, and a DistillationConfig teacher_model_name_or_path",
)  # fmt: skip
"""A GRPOConfig."""


def _generation(conversion: Conversion) -> None:
    settings = conversion.settings
    top_p, top_k = settings.number("top_p"), settings.whole("top_k")
    conversion.carry("top_p", "generation.top_p", None if top_p is None or top_p >= 1 else top_p)
    conversion.carry("top_k", "generation.top_k", top_k if top_k is not None and top_k > 0 else None)
    conversion.carry("min_p", "generation.min_p", settings.number("min_p") or None)
    if not settings.flag("use_vllm"):
        conversion.used("use_vllm")
        return
    conversion.carry("use_vllm", "generation.engine", "vllm")
    options = {"gpu_memory_utilization": 0.3} if settings.text("vllm_mode") == "colocate" else {}
    if settings.text("vllm_mode") == "server":
        keys = ["vllm_mode", *(key for key in settings.given if key.startswith("vllm_server_"))]
        conversion.lose(keys, "vLLM runs in the processes of the run here")
    for theirs in ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length"):
        if (value := settings.number(theirs)) is not None:
            ours = theirs.removeprefix("vllm_").replace("max_model_length", "max_model_len")
            options[ours] = value if "gpu" in theirs else int(value)
        conversion.used(theirs)
    if options:
        keys = [key for key in settings.given if key.removeprefix("vllm_").replace("length", "len") in options]
        conversion.carry(keys or ["vllm_mode"], "generation.engine_options", options)
    conversion.used("vllm_mode")


def _correction(conversion: Conversion) -> None:
    """The weight of a token or a row by how its probability differs between the engines."""
    settings = conversion.settings
    if not settings.flag("use_vllm"):
        return
    keys = [f"vllm_importance_sampling_{word}" for word in ("mode", "clip_max", "clip_min")]
    conversion.used(*keys, "vllm_importance_sampling_correction")
    if not settings.flag("vllm_importance_sampling_correction"):
        conversion.carry("vllm_importance_sampling_correction", "objective.correction", "none")
        return
    level, _, kind = (settings.text(keys[0]) or "").partition("_")
    if level not in ("token", "sequence") or kind not in ("truncate", "mask"):
        raise settings.wrong(keys[0], "token or sequence, then _truncate or _mask")
    cap, floor = settings.number(keys[1]), settings.number(keys[2])
    found: dict[str, Any] = {"name": kind, "level": level, "cap": 1e9 if cap is None else cap}
    if kind == "mask" and floor is not None:
        found["floor"] = floor
    elif floor is not None:
        conversion.lose(keys[2], "a truncated weight has no least value here")
    conversion.carry(keys[:2], "objective.correction", found)


def _batches(conversion: Conversion, gpus: int | None) -> int:
    """Prompts and updates of an iteration, which is one generation there; returns optimizer steps of an iteration."""
    settings, many = conversion.settings, gpus or 1
    if gpus is None:
        conversion.want(
            "the file does not say on how many GPUs it ran; say it with --gpus, since it decides rollout.prompts"
        )
    device, passes = settings.count("per_device_train_batch_size"), settings.count("gradient_accumulation_steps")
    # A trainer that compares nothing has one completion of a prompt, and no key for it.
    of_group = ["num_generations"] if settings.value("num_generations") is not None else []
    group, update = settings.count("num_generations") if of_group else 1, device * passes * many
    keys = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    if settings.value("generation_batch_size") is not None:
        keys.append("generation_batch_size")
        rollout = settings.count("generation_batch_size")
    elif settings.value("steps_per_generation") is not None:
        keys.append("steps_per_generation")
        rollout = device * many * settings.count("steps_per_generation")
    else:
        rollout = update
    conversion.used("generation_batch_size", "steps_per_generation")
    # Several generations for one update are one rollout here, because the weights do not move between them.
    images = max(rollout, update)
    prompts = max(round(images / group), 1)
    note = f"{device} × {images // max(device * many, 1)} batches × {many} GPUs"
    note += f" / {group} completions" if of_group else ", and one completion of each prompt"
    note += "" if images == prompts * group else ", rounded"
    conversion.carry([*keys, *of_group], "rollout.prompts", prompts, note)
    updates = max(min(images // update, prompts), 1)
    note = "an update takes whole groups here, and a random share of the completions there" if updates > 1 else ""
    conversion.carry(keys, "optimizer.updates", updates, note)
    passes = settings.count("num_iterations") if settings.value("num_iterations") is not None else 1
    if rollout < update and passes > 1:
        conversion.lose("num_iterations", "their update holds a generation several times; here it is a further pass")
    return updates * passes


def _evaluation(conversion: Conversion, steps: int) -> None:
    settings = conversion.settings
    conversion.used("eval_strategy", "eval_steps")
    if settings.text("eval_strategy") in (None, "no"):
        return
    if settings.text("eval_strategy") == "epoch":
        conversion.lose(["eval_strategy", "eval_steps"], "write evaluate.every, a number of iterations")
    else:
        # Without a number of its own, an evaluation comes with every line of their log.
        own = settings.value("eval_steps") is not None
        every(conversion, ["eval_strategy", "eval_steps" if own else "logging_steps"], "evaluate.every", steps)
    conversion.carry(
        "temperature", "evaluate.temperature", settings.number("temperature"), "as there; 0 is the likeliest answer"
    )
    key = "num_generations" if settings.value("num_generations_eval") is None else "num_generations_eval"
    if settings.value(key) is not None:
        conversion.carry(key, "evaluate.seeds", settings.count(key))


def reward_settings(conversion: Conversion) -> None:
    """The rewards and their weights."""
    settings = conversion.settings
    names, notes = list(settings.texts("reward_funcs") or []), list[str]()
    model = settings.text("reward_model_name_or_path")
    names = ([model] if model else []) + names
    weights = settings.value("reward_weights")
    listed = weights if isinstance(weights, list) else []
    if not names:
        # A GRPOConfig has the weights of reward functions that only the program names.
        names = [f"reward_{number + 1}" for number in range(len(listed))] if len(listed) > 1 else ["reward"]
    if weights is not None and len(listed) != len(names):
        raise settings.wrong("reward_weights", f"a list of {len(names)} numbers, one for each reward")
    entries: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        weight = listed[number] if number < len(listed) else 1.0
        share = ForeignSettings({"reward_weights": weight}, {}, settings.place).number("reward_weights") or 0.0
        entry = entry_of(conversion, name, OF_TRL.get(name), share, notes)
        if entry["name"] == "length":
            entry["options"]["tokenizer"] = conversion.recipe["model"]["path"]
        if entry["name"] in [other["name"] for other in entries]:
            entry["label"] = f"{entry['name'].rpartition(':')[2]}_{number + 1}"
        entries.append(entry)
    keys = [key for key in ("reward_model_name_or_path", "reward_funcs", "reward_weights") if settings.value(key)]
    if keys:
        conversion.carry(keys, "rewards", entries, "; ".join(notes))
    else:
        conversion.follow("not in the file", "rewards", entries)
    conversion.used("reward_model_name_or_path", "reward_funcs", "reward_weights")


def hub_set(settings: ForeignSettings, split: str) -> str | None:
    """A split of the file's data set of the hub, as a recipe names it; None if the file names no such data set."""
    name, config = settings.text("dataset_name"), settings.text("dataset_config")
    if name is None or settings.value("datasets") or re.fullmatch(r"[\w.-]+/[\w.-]+", name) is None:
        return None
    if Path(name).exists() or name.endswith(ENDINGS):  # a file, also where it is not there yet
        return None
    return f"{HUB}{name}?split={split}" + (f"&config={config}" if config else "")


def _by_column(settings: ForeignSettings, source: str | None) -> str | None:
    """The source of prompts with the column that open-r1's `dataset_prompt_column` names."""
    column = settings.text("dataset_prompt_column")
    if source is None or column in (None, "prompt"):
        return source
    return f"{source}{'&' if '?' in source else '?'}column={column}"


def _data(conversion: Conversion) -> None:
    """A file or a data set of the hub is carried over. A mixture of data sets has to be written into files first."""
    settings = conversion.settings
    name = settings.text("dataset_name")
    evaluates = settings.text("eval_strategy") not in (None, "no")
    train, test = (settings.text(f"dataset_{which}_split") or which for which in ("train", "test"))
    known = _by_column(settings, name if name is not None and name.endswith(ENDINGS) else hub_set(settings, train))
    note = "" if known == name else "prompts are its column `prompt`; for another column add `&column=NAME`"
    keys = [key for key in ("dataset_name", "datasets", "dataset_config") if settings.value(key)] or ["dataset_name"]
    if settings.text("dataset_prompt_column") is not None:
        keys, note = [*keys, "dataset_prompt_column"], "dataset_prompt_column is a key of open-r1"
    conversion.carry(keys if known else "dataset_name", "data.train", known or PROMPTS[0], note if known else "")
    if known is None:
        written = f"`datasets.load_dataset(…, split='train').to_json('{PROMPTS[0]}')`"
        text = f"write its prompts into {PROMPTS[0]}, such as with {written}; a column `prompt` holds texts or "
        conversion.lose(keys, f"{text}conversations, and rewards get the other columns")
    conversion.used("dataset_name", "datasets", "dataset_config", "dataset_train_split", "dataset_test_split")
    conversion.used("test_split_size")
    if evaluates:
        heldout = _by_column(settings, hub_set(settings, test))
        conversion.carry("eval_strategy", "data.heldout", heldout or PROMPTS[1])
        if heldout is None:
            conversion.want(f"write held-out prompts into {PROMPTS[1]}, or give another file as data.heldout")
    else:
        note = "no evaluation; a file of held-out prompts shows what a run gains"
        conversion.carry("eval_strategy", "data.heldout", None, note)
