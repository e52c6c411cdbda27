"""Shapes of pipelines without their weights, from the configurations of a folder or from the id of a known model."""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..weights.json_files import read_json_object
from ..weights.pipeline_folders import is_part
from ..weights.precision import cast_base
from .families import FAMILIES
from .known_pipelines import CAUSAL_VAE, EDITED, EDITS, KNOWN, ONE_EVALUATION, Architecture
from .sound_inputs import sound_shape


def architecture_of(path: str, pipeline: str | None = None) -> Architecture:
    """The shapes of a pipeline folder, or of a known model id; no weight is read.

    Args:
        path: the folder or the id.
        pipeline: the class that loads it, if it is not the class that it names.

    Raises:
        ValueError: `path` is neither of them, or the class of the pipeline's denoiser is not in `FAMILIES`.
    """
    folder = Path(path)
    if not (folder / "model_index.json").is_file():
        if path not in KNOWN:
            raise ValueError(
                f"the shapes of {path!r} are not known; give the folder of the pipeline (its weights are not read), or "
                f"one of {', '.join(KNOWN)}"
            )
        known = KNOWN[path]
        if pipeline is None:
            return known
        once = known.one_evaluation or pipeline in ONE_EVALUATION
        own = {key: value for key, value in known.inputs.items() if key not in EDITED}
        return replace(known, inputs={**own, **EDITS.get(pipeline, {})}, one_evaluation=once)
    index = _read(folder / "model_index.json")
    part = {name: entry[1] for name, entry in index.items() if is_part(entry)}
    key = "unet" if "unet" in part else "transformer"
    if part.get(key) not in FAMILIES or "vae" not in part:
        raise ValueError(
            f"{path}: there is no estimate for a pipeline with the denoiser {part.get(key, 'none')}; there are "
            f"estimates for {', '.join(FAMILIES)}"
        )
    kind = pipeline or str(read_json_object(folder / "model_index.json").get("_class_name"))
    vision = [name for name in part if name.startswith("image_encoder") and (folder / name).is_dir()]
    encoders = [name for name in part if name.startswith("text_encoder") and (folder / name).is_dir()]
    settings = _read(folder / key / "config.json")
    once = bool(index.get("is_distilled") or settings.get("is_turbo"))
    return Architecture(
        (part[key], settings),
        (part["vae"], _read(folder / "vae" / "config.json")),
        {name: _stored_numbers(folder / name) for name in encoders},
        experts=2 if "transformer_2" in part else 1,
        others={name: _stored_numbers(folder / name) for name in OTHERS if name in part},
        guider=_conditions(folder / "guider", part["guider"]) if "guider" in part else None,
        one_evaluation=kind in ONE_EVALUATION or once,
        image_encoders={name: _stored_numbers(folder / name) for name in vision},
        inputs={
            **EDITS.get(kind, {}),
            "expand_timesteps": bool(index.get("expand_timesteps")),
            **({"image_tokens": _image_tokens(folder / vision[0] / "config.json")} if vision else {}),
            **(_sound(folder) if FAMILIES[part[key]].sound else {}),
            **(_conditioned(folder) if "condition_encoder" in part else {}),
        },
    )


OTHERS = (
    "connectors", "audio_vae", "vocoder",
    "duration_embedder", "condition_encoder", "audio_tokenizer", "audio_token_detokenizer",
)  # fmt: skip
"""Folders of further networks of a pipeline, which stay on the card."""


def _conditions(folder: Path, name: str) -> int:
    """Evaluations of a state that a guider of this class asks for, in the steps in which it guides.

    Raises:
        ValueError: diffusers has no such guider, or the guider does not take its configuration.
    """
    import diffusers

    path = folder / "guider_config.json"
    kind: Any = getattr(diffusers, name, None)
    if not hasattr(kind, "num_conditions"):
        raise ValueError(
            f"{folder}: there is no estimate for a pipeline with the guider {name}, because diffusers has no guider of "
            "this name; name another guider in model_index.json, such as ClassifierFreeGuidance"
        )
    try:
        return int(kind.from_config(_read(path)).num_conditions)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {name} does not take this configuration: {error}") from None


def _sound(folder: Path) -> dict[str, Any]:
    """`sound_rate` and `kept_width` of a pipeline that makes a sound, see `Architecture.inputs`."""
    sound, texts = _read(folder / "audio_vae" / "config.json"), _read(folder / "connectors" / "config.json")
    # The autoencoder of sounds has one token for four steps of its spectrogram, as a constant of its module.
    rate = sound.get("sample_rate", 16000) / sound.get("mel_hop_length", 160) / 4
    return {"sound_rate": rate, "kept_width": texts["caption_channels"] * texts["text_proj_in_factor"]}


def _conditioned(folder: Path) -> dict[str, Any]:
    """`kept_width` of a pipeline whose condition encoder makes the denoiser's texts in each call."""
    return {"kept_width": _read(folder / "condition_encoder" / "config.json")["text_hidden_dim"]}


def _image_tokens(path: Path) -> int:
    """Tokens of a picture from a vision transformer's configuration: its patches, and in CLIP one for the whole."""
    config = _read(path)
    try:
        patches = (int(config["image_size"]) // int(config["patch_size"])) ** 2
        return patches + (0 if str(config.get("model_type", "")).startswith("siglip") else 1)
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path}: there is no estimate, because it has no whole numbers image_size and patch_size; write the "
            "numbers of the image encoder there"
        ) from None


def built(name: str, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """A network of diffusers on `meta`, in the number format that `cast_base` would give it."""
    import diffusers

    with torch.device("meta"), warnings.catch_warnings():
        # The autoencoders of sounds use a function of torch that has a newer form.
        warnings.filterwarnings("ignore", message=".*weight_norm.*", category=FutureWarning)
        module: nn.Module = getattr(diffusers, name).from_config(dict(config))
    module.to("meta").requires_grad_(False)
    pipe: Any = SimpleNamespace(components={"transformer": module})
    cast_base(pipe, dtype)
    return module


def latent_shape(architecture: Architecture, call: Mapping[str, Any]) -> tuple[int, ...]:
    """Shape of the latent that the VAE decodes: [C, h, w], [C, f, h, w] for a model of videos, [C, L] of sounds.

    A denoiser may take more channels: image-to-video appends a picture to the state.
    """
    (name, config), (_, settings) = architecture.denoiser, architecture.vae
    family = FAMILIES[name]
    if family.seconds is not None:
        return sound_shape(family.seconds, call, settings)
    scale, each = _compression(settings)
    tall, wide = family.default_size(config, scale)
    height, width = int(call.get("height", tall)) // scale, int(call.get("width", wide)) // scale
    channels = int(settings.get("latent_channels") or settings.get("z_dim") or CAUSAL_VAE["z_dim"])
    if family.frames is None:
        return channels, height, width
    frames = family.frames if family.frames == 1 else int(call.get("num_frames", family.frames))
    return channels, (frames - 1) // each + 1, height, width


def appended_tokens(architecture: Architecture, call: Mapping[str, Any], shown: bool = False) -> dict[str, int]:
    """`picture_tokens` of a class that may get pictures beside its prompt, such as FLUX.2; nothing for other classes.

    Args:
        architecture: of the pipeline.
        call: arguments of the pipeline's call. Pictures in `image` count by their sizes.
        shown: whether each prompt has a picture of its own, which counts as a million pixels.
    """
    if not FAMILIES[architecture.denoiser[0]].appended:
        return {}
    unit, given = 2 * _compression(architecture.vae[1])[0], call.get("image")
    sizes: list[tuple[int, int]] = [_MILLION] if shown else []
    if given is not None and not shown:
        pictures = given if isinstance(given, (list, tuple)) else [given]
        sizes = [getattr(picture, "size", _MILLION) for picture in pictures]
    return {"picture_tokens": sum(_tokens_of(width, height, unit) for width, height in sizes)} if sizes else {}


_MILLION = 1024, 1024


def _tokens_of(width: int, height: int, unit: int) -> int:
    """Tokens of a picture: FLUX.2 brings a picture to a million pixels if it has more."""
    if width * height > math.prod(_MILLION):
        scale = math.sqrt(math.prod(_MILLION) / (width * height))
        width, height = int(width * scale), int(height * scale)
    return (width // unit) * (height // unit)


def _compression(settings: Mapping[str, Any]) -> tuple[int, int]:
    """How many times smaller a latent is than its picture, on a side; and how many frames of a video make one of it."""
    blocks = settings.get("block_out_channels") or settings.get("dim_mult") or CAUSAL_VAE["dim_mult"]
    space, time = 2 ** (len(blocks) - 1), 4
    if "spatio_temporal_scaling" in settings:
        halved = 2 ** sum(settings["spatio_temporal_scaling"])
        space, time = settings["patch_size"] * halved, settings["patch_size_t"] * halved
    return (
        int(settings.get("scale_factor_spatial") or settings.get("spatial_compression_ratio") or space),
        int(settings.get("scale_factor_temporal") or settings.get("temporal_compression_ratio") or time),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return {key: value for key, value in found.items() if not key.startswith("_")}


def _stored_numbers(folder: Path) -> int:
    """How many numbers the safetensors files of a folder hold; only the headers are read."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for entry in header.values():
            shape = entry.get("shape")
            if shape is not None:
                count = 1
                for size in shape:
                    count *= size
                total += count
    return total
