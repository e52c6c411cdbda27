"""Checks of the arguments of a pipeline's call: names, types of values, and sizes that the pipeline would round."""

from __future__ import annotations

import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..weights.json_files import read_json_object

OURS = {"prompt", "latents", "num_inference_steps", "generator", "output_type", "return_dict", "timesteps"}
OURS |= {"callback_on_step_end", "callback_on_step_end_tensor_inputs"}
_MENDS = {
    "num_inference_steps": "set sampler.steps",
    "prompt": "prompts come from data.train and data.heldout",
    "generator": "set run.seed",
}
_PLAIN = (int, float, bool, str)
TEXT = re.compile(r"(negative_)?prompt(_\d+)?")
"""Names of arguments that have a text for each prompt."""
FURTHER = ("mask_image", "control_image", "control_mask", "last_image", "image_reference", "reference_image")
"""Names of arguments that are pictures beside `image`, or in its place, in all classes that have them."""
PICTURES = ("image", *FURTHER)
"""Names of arguments that are pictures, in all classes that have them."""
TEXTS = ("lyrics",)
"""Names of arguments that have a text for each prompt beside the prompt, from a column of that name."""
_NEVER_WITHOUT = ("mask_image", "control_image", "control_mask")

Parameters = Mapping[str, inspect.Parameter]


def set_by_us(name: str) -> bool:
    """Whether flowgrpo itself sets an argument of the call at each evaluation."""
    return name in OURS or name.endswith("_per_prompt")


def accepts(parameters: Parameters, name: str) -> bool:
    """Whether a call has an argument of this name, or takes any."""
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def pictures_left_out(parameters: Parameters, call: Mapping[str, Any], needed: bool = False) -> list[str]:
    """Names of the pictures that a call takes and is not given; with `needed`, see `needs_picture`."""
    names = [name for name in PICTURES if name in parameters and call.get(name) is None]
    return [name for name in names if not needed or needs_picture(parameters, name)]


def needs_picture(parameters: Parameters, name: str) -> bool:
    """Whether a call has an argument for a picture that it cannot do without.

    For most of these arguments, diffusers has None as the default, and the call fails with it.
    """
    if name not in parameters:
        return False
    painted = name == "image" and "mask_image" in parameters
    return parameters[name].default is inspect.Parameter.empty or name in _NEVER_WITHOUT or painted


def did_you_mean(parameters: Parameters, name: str) -> str:
    """The end of a message about an unknown argument: the name that is most like it, or nothing."""
    close = difflib.get_close_matches(name, list(parameters), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def argument_faults(parameters: Parameters, call: Mapping[str, Any], place: str, owner: str) -> Iterator[str]:
    """Faults of a call's arguments, one message for each; found before the pipeline is loaded.

    Args:
        parameters: of the call.
        call: name -> value, as read from YAML.
        place: text before each name in a message, such as "model.call.".
        owner: name of the pipeline's class.
    """
    for name, value in call.items():
        if set_by_us(name):
            yield f"{place}{name} is set for each evaluation; leave it out ({_MENDS.get(name, 'it cannot be set')})"
        elif name == "sigmas":
            yield f"{place}sigmas is a table before the shift; set sampler.sigmas, the table after it"
        elif not accepts(parameters, name):
            yield f"{place}{name}: {owner} has no argument {name!r}{did_you_mean(parameters, name)}"
        elif name in parameters and (fault := _value_fault(parameters[name], value)):
            yield f"{place}{name} is {fault}"
        elif TEXT.fullmatch(name) and isinstance(value, list):
            yield f"{place}{name} is a list, and it is the text of every prompt; give one text"


def _value_fault(parameter: inspect.Parameter, value: Any) -> str | None:
    shown = str(value).lower() if isinstance(value, bool) else f"{value!r:.80}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{shown}; give a finite number"
    kinds = _kinds(parameter.annotation)
    if kinds is None or value is None:
        return None
    if type(value) in kinds or (type(value) is int and float in kinds):
        return None
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}
    return f"{shown}; give {' or '.join(words[kind] for kind in words if kind in kinds)}"


def _kinds(annotation: Any) -> set[type] | None:
    """The plain types that an annotation allows; None if it allows other types or cannot be interpreted."""
    found: set[type] = set()
    for part in _parts(annotation):
        kind = _NAMES.get(part.partition("[")[0]) if isinstance(part, str) else typing.get_origin(part) or part
        if kind is type(None):
            continue
        if kind is not list and kind not in _PLAIN:
            return None
        found.add(kind)
    return found or None


_NAMES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "List": list}
_NAMES["None"] = type(None)


def _parts(annotation: Any) -> list[Any]:
    """The members of a union in any notation; another annotation is its own only member."""
    if isinstance(annotation, str):
        inner = re.fullmatch(r"(Optional|Union)\[(.*)\]", annotation.strip())
        return [part.strip() for part in re.split(r"[|,](?![^\[]*\])", inner[2] if inner else annotation)]
    return list(typing.get_args(annotation)) if typing.get_origin(annotation) in _UNIONS else [annotation]


_UNIONS = (typing.Union, types.UnionType)


def strength_faults(parameters: Parameters, call: Mapping[str, Any], place: str) -> Iterator[str]:
    """A message about a strength below 1, which leaves out some of the steps; it may be the default of the class."""
    default = parameters["strength"].default if "strength" in parameters else None
    value = call.get("strength", default)
    if default is not None and isinstance(value, (int, float)) and value < 1:
        own = "" if "strength" in call else ", the default of the pipeline"
        yield f"{place}strength is {value:g}{own}, and below 1 the pipeline leaves out some steps; write strength: 1.0"


def size_faults(folder: Path, call: Mapping[str, Any], place: str) -> Iterator[str]:
    """Messages about sizes that the pipeline in a folder cannot make: heights, widths and numbers of frames.

    Some classes round them silently.
    """
    unit, most = size_unit(folder), largest_side(folder)
    for name in ("height", "width"):
        value = call.get(name)
        if type(value) is not int:
            continue
        if value < 1:
            yield f"{place}{name} is {value}; give a multiple of {unit or 'what the model takes'} above 0"
        elif unit and value % unit:
            below, above = value - value % unit, value - value % unit + unit
            near = f"{below} or {above}" if below else str(above)
            yield f"{place}{name} is {value}, but this pipeline makes only multiples of {unit}; write {near}"
        elif most and value > most:
            said = f"this pipeline makes at most {most} pixels a side; write {most} or less"
            yield f"{place}{name} is {value}, but {said}"
    frames = call.get("num_frames")
    if type(frames) is int and (fault := _frames_fault(folder, frames)):
        yield f"{place}num_frames is {frames}{fault}"


def _frames_fault(folder: Path, frames: int) -> str | None:
    """What is wrong with a number of frames; None if nothing is, or if the configurations do not tell."""
    unit = frames_unit(folder)
    if frames < 1:
        return "; give a number above 0" + ("" if unit in (None, 1) else f", 1 more than a multiple of {unit}")
    if unit is None or (frames - 1) % unit == 0:
        return None
    below = (frames - 1) // unit * unit + 1
    # A single frame is a picture, and hardly what is meant.
    near = str(below + unit) if below == 1 else f"{below} or {below + unit}"
    return f", but this pipeline makes only 1 more than a multiple of {unit}; write {near}"


def refuse_other_size(call: Mapping[str, Any], height: int, width: int, frames: int | None = None) -> None:
    """Refuse images whose size differs from the call. Many pipelines silently round a size that they cannot make.

    Args:
        call: arguments of the pipeline's call.
        height: of an image that the pipeline made, in pixels.
        width: of the same image, in pixels.
        frames: of a video; None for an image.

    Raises:
        ValueError: an image's height or width, or the number of frames, is not as in the call.
    """
    for name, made in (("height", height), ("width", width), ("num_frames", frames)):
        asked = call.get(name)
        if type(asked) is not int or made is None or asked == made:
            continue
        mend = f"write {name}: {made}"
        if name != "num_frames" and max(asked, made) % min(asked, made) == 0:
            # Some classes assume a scale of the VAE. With another VAE, the size is wrong by the ratio of the scales.
            mend = f"leave {name} out, or give the pipeline a VAE of the scale that its class assumes"
        raise ValueError(f"the call's {name} is {asked}, but the pipeline makes {made}; {mend}")


def size_unit(folder: Path) -> int | None:
    """Side of one patch in pixels, from the configurations in a folder; None if the configurations do not tell."""
    vae = _config(folder / "vae")
    channels, halved = vae.get("block_out_channels"), vae.get("temperal_downsample")
    scale: Any = vae.get("scale_factor_spatial") or vae.get("spatial_compression_ratio")
    if scale is None and vae.get("_class_name") == "AutoencoderKL" and isinstance(channels, list):
        scale = 2 ** (len(channels) - 1)
    elif scale is None and isinstance(halved, list):
        scale = 2 ** len(halved)
    if type(scale) is not int:
        return None
    denoiser = _config(folder / "transformer")
    patch = denoiser.get("patch_size", 1)
    patch = patch[-1] if isinstance(patch, list) and patch else patch
    if type(patch) is not int:
        return None
    latent = vae.get("latent_channels")
    packed = patch == 1 and type(latent) is int and denoiser.get("in_channels") == 4 * latent
    return scale * (2 if packed else patch)


def largest_side(folder: Path) -> int | None:
    """Longest side in pixels that a pipeline has positions for; None if it has no such limit, or none is told.

    Other classes than Stable Diffusion 3 read `pos_embed_max_size` in other ways.
    """
    denoiser, unit = _config(folder / "transformer"), size_unit(folder)
    most = denoiser.get("pos_embed_max_size") if denoiser.get("_class_name") == "SD3Transformer2DModel" else None
    return most * unit if type(most) is int and unit else None


def frames_unit(folder: Path) -> int | None:
    """Frames of a video for each frame of its latent after the first; None if the configurations do not tell.

    Only autoencoders are known that decode n frames of a latent into 1 + (n - 1) * unit frames.
    """
    vae = _config(folder / "vae")
    kind, unit = vae.get("_class_name"), vae.get("temporal_compression_ratio")
    if kind == "AutoencoderKLWan":
        unit = vae.get("scale_factor_temporal") or _power(vae.get("temperal_downsample"))
    elif kind == "AutoencoderKLLTXVideo":
        found, patch = _power(vae.get("spatio_temporal_scaling")), vae.get("patch_size_t", 1)
        unit = unit or (found * patch if found is not None and type(patch) is int else None)
    elif kind == "AutoencoderKLMochi":
        parts = vae.get("temporal_expansions")
        unit = math.prod(parts) if isinstance(parts, list) and all(type(part) is int for part in parts) else None
    elif kind not in ("AutoencoderKLHunyuanVideo", "AutoencoderKLHunyuanVideo15"):
        return None
    return unit if type(unit) is int and unit > 0 else None


def _power(halved: Any) -> int | None:
    """The factor by which layers reduce the frames: a layer halves them, or keeps them."""
    return 2 ** sum(map(bool, halved)) if isinstance(halved, list) else None


def _config(folder: Path) -> dict[str, Any]:
    return read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
