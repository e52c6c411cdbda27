"""Denoisers of another pipeline that teach a pipeline: do they fit, and their weights.

They are called by the pipeline that learns, with its latents, texts and noise levels. So they must take the same
inputs, and mean the same by them. How large they are does not matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .json_files import read_json_object
from .pipeline_folders import DENOISERS, INDEX, from_hub, is_part, weight_faults

if TYPE_CHECKING:
    # This module is also imported where a recipe is checked without these libraries.
    import torch
    from torch import nn

KIND = "_class_name"
_INPUTS: tuple[str, ...] = (
    "in_channels", "out_channels", "audio_in_channels", "joint_attention_dim", "pooled_projection_dim",
    "caption_channels", "cap_feat_dim", "text_dim", "text_embed_dim", "text_embed_2_dim", "image_dim",
    "image_embed_dim", "siglip_feat_dim", "guidance_embeds", "image_condition_type", "addition_embed_type",
    "addition_time_embed_dim", "projection_class_embeddings_input_dim", "class_embed_type", "encoder_hid_dim",
)  # fmt: skip
"""Settings of denoisers that say what goes in and what comes out."""
_TEXTS = "cross_attention_dim"
"""The width of texts, unless the denoiser has `caption_channels`: then this is a width within it."""
_OTHERS = {
    "vae": ("latent_channels", "z_dim", "scaling_factor", "shift_factor", "latents_mean", "latents_std"),
    "scheduler": ("prediction_type",),
}
"""Settings of other parts that say what a latent and a prediction mean."""
_FILES = {"scheduler": "scheduler_config.json"}

Configs = Mapping[str, Mapping[str, Any]]
"""Name of a part -> its settings, with its class at `KIND`."""


def configs_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings of the parts of a pipeline folder that decide whether one denoiser can stand in for another.

    Raises:
        ValueError: the index or a file of settings cannot be read.
    """
    index = read_json_object(folder / INDEX)
    names = [name for name in (*DENOISERS, *_OTHERS) if is_part(index.get(name))]
    files = {name: folder / name / _FILES.get(name, "config.json") for name in names}
    return {name: _whole(read_json_object(file)) for name, file in files.items() if name in DENOISERS or file.is_file()}


def _whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a part, also those that its file leaves out because its class has them by default."""
    import diffusers

    name = config.get(KIND)
    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    parameters = {} if kind is None else inspect.signature(kind.__init__).parameters
    given = {key: one.default for key, one in parameters.items() if one.default is not one.empty} | dict(config)
    # The schedulers of flow matching have no such setting, because they know one prediction only.
    return {"prediction_type": "flow_prediction", **given} if str(name).endswith("Scheduler") else given


def check_whole_teacher(place: str, folder: Path, student: Path | None) -> None:
    """Check the denoisers of a pipeline folder without loading a weight.

    Args:
        place: the key of the recipe that names the folder.
        folder: of the teacher.
        student: folder of the pipeline that learns; None if it is not known yet.

    Raises:
        ValueError: weights are missing or damaged, or the denoisers are not called as the student's are.
    """
    theirs = configs_of(folder)
    if student is not None:
        require_fit(place, str(folder), theirs, configs_of(student))
    faults = [fault for name in theirs if name in DENOISERS for fault in _weight_faults(folder / name)]
    if faults:
        raise ValueError("\n".join(f"{place}: {fault}" for fault in faults))


def _weight_faults(folder: Path) -> Iterator[str]:
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        yield (
            f"{folder} has weights in .bin files, and a teacher is read from .safetensors files; load it with "
            "diffusers, and save it with `save_pretrained`"
        )
        return
    yield from weight_faults(folder)


def require_fit(place: str, path: str, theirs: Configs, ours: Configs) -> None:
    """Refuse a teacher whose denoisers are not called as ours are, or mean something else by a latent.

    Args:
        place: the key of the recipe that names the teacher.
        path: of the teacher.
        theirs: the settings of its parts.
        ours: the settings of the parts of the pipeline that learns.

    Raises:
        ValueError: a part differs; the message says which, and how.
    """
    mend = "name a pipeline with the latents and the texts of model.path, such as another size of the same model"
    found, wanted = ([name for name in DENOISERS if name in configs] for configs in (theirs, ours))
    if found != wanted:
        raise ValueError(
            f"{place}: {path} has the denoisers {' and '.join(found) or 'none'}, and the model has "
            f"{' and '.join(wanted)}; {mend}"
        )
    for name in wanted:
        one, other = theirs[name], ours[name]
        if one.get(KIND) != other.get(KIND):
            raise ValueError(
                f"{place}: the {name} of {path} is a {one.get(KIND)}, and the model's is a {other.get(KIND)}; {mend}"
            )
        keys = _INPUTS if "caption_channels" in other else (*_INPUTS, _TEXTS)
        _require_same(place, path, name, keys, one, other, mend)
    for name, meant in _OTHERS.items():
        _require_same(place, path, name, meant, theirs.get(name, {}), ours.get(name, {}), mend)


def _require_same(
    place: str, path: str, name: str, keys: tuple[str, ...], one: Mapping[str, Any], other: Mapping[str, Any], mend: str
) -> None:
    for key in keys:
        if key in one and key in other and _plain(one[key]) != _plain(other[key]):
            raise ValueError(
                f"{place}: {key} is {one[key]!r:.60} in the {name} of {path}, and {other[key]!r:.60} in the model; "
                f"{mend}"
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def load_whole_teacher(
    place: str, path: str, pipe: Any, modules: Mapping[str, nn.Module], dtype: torch.dtype
) -> dict[str, nn.Module]:
    """The denoisers of another pipeline, in host memory. No code of its folder is run, and no pickle is read.

    Args:
        place: the key of the recipe that names the pipeline.
        path: its folder or hub id.
        pipe: the pipeline that learns.
        modules: its denoisers by name; the teacher's are of the same classes.
        dtype: of the weights.

    Raises:
        ValueError: the pipeline cannot be read, lacks weights, or is not called as `pipe` is, or another part of `pipe`
            computes with layers of its denoisers.
    """
    from huggingface_hub import constants

    from .precision import in_dtype

    parts = {**modules, **_others(pipe)}
    with from_hub(path):
        require_fit(place, path, _configs_at(path, parts), _configs_in(parts))
    _require_apart(place, path, pipe, modules)
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        kind: Any = type(module)
        with from_hub(path):
            # Without this argument, diffusers asks the hub for the parts of a large model even if it may not.
            made, report = kind.from_pretrained(
                path, subfolder=name, use_safetensors=True, output_loading_info=True,
                local_files_only=constants.HF_HUB_OFFLINE, **in_dtype(dtype),
            )  # fmt: skip
        if lacking := sorted(report["missing_keys"]):
            raise ValueError(
                f"{place}: the files of the {name} of {path} lack {len(lacking)} of its weights, such as "
                f"{lacking[0]}; get the model again"
            )
        found[name] = made
    return found


def _require_apart(place: str, path: str, pipe: Any, modules: Mapping[str, nn.Module]) -> None:
    """Refuse a pipeline whose control net has layers of its denoiser: they would stay when the teacher takes over."""
    own = {id(weight) for module in modules.values() for weight in module.parameters()}
    for name, part in pipe.components.items():
        if name not in modules and any(id(weight) in own for weight in getattr(part, "parameters", tuple)()):
            raise ValueError(
                f"{place}: the {name} of {type(pipe).__name__} computes with layers of the model that is trained, so "
                f"{path} cannot take the place of this model; use a LoRA as the teacher, with lora in place of path"
            )


def _others(pipe: Any) -> dict[str, Any]:
    parts = {name: getattr(pipe, name, None) for name in _OTHERS}
    return {name: part for name, part in parts.items() if hasattr(part, "config")}


def _configs_in(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: _whole({**part.config, KIND: type(part).__name__}) for name, part in parts.items()}


def _configs_at(path: str, parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """As `configs_of`, also of a hub id. A denoiser that `parts` lacks has no settings here, only its name."""
    from diffusers import DiffusionPipeline

    if Path(path).is_dir():
        return configs_of(Path(path))
    index = DiffusionPipeline.load_config(path)
    names = [name for name in (*DENOISERS, *_OTHERS) if is_part(index.get(name))]
    return {
        name: _whole(type(parts[name]).load_config(path, subfolder=name)) if name in parts else {} for name in names
    }
