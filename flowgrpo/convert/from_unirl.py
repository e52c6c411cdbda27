"""A configuration of UniRL as a recipe: images and videos. `from_unirl_text.py` has text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .conversion import Conversion, Remark
from .flow_grpo_scripts import model_word
from .foreign_settings import ForeignSettings, named
from .from_unirl_text import text_run
from .unirl_keys import DEFAULTS, IDLE, MISSING, ROWS
from .unirl_keys import OF_TEXT as TEXT_DEFAULTS
from .unirl_methods import method
from .unirl_models import FAMILIES, OF_TEXT, family_name, noise_levels
from .unirl_rewards import rewards
from .unirl_settings import DATA, model_of, optimizer_of, prompts_of, run_of, updates_of
from .yaml_references import References


def from_unirl(path: Path, given: Mapping[str, Any]) -> Conversion:
    """Convert a configuration file. References are followed within the file, and no environment is read.

    Args:
        path: of the file.
        given: what the file holds.

    Raises:
        ValueError: a reference leads nowhere, a value has a wrong type, or the model or the algorithm has no
            counterpart here.
    """
    found = References(given, str(path))
    unsaid = found.missing()
    values = {key: value for key, value in found.values.items() if key not in unsaid}
    origins = {key: f"the default of ${{{', '.join(sorted(names))}}}" for key, names in found.assumed.items()}
    name = family_name(ForeignSettings(values, {}, str(path)))
    settings = ForeignSettings(values, TEXT_DEFAULTS if name in OF_TEXT else DEFAULTS, str(path), origins)
    conversion = Conversion(settings, settings.text("logging.run_name") or path.stem)
    if name in OF_TEXT:
        text_run(conversion, name)
    else:
        _images(conversion, name)
    _same_params(conversion)
    for key, value in unsaid.items():
        if not key.startswith(("transfer_queue.", "logging.", DATA)):
            text = f"the environment variable {value.told} says it there; write the value into a copy of the file"
            conversion.lost.append(Remark(named(key), text))
    conversion.lose_rows(MISSING)
    conversion.finish(IDLE)
    return conversion


def _images(conversion: Conversion, name: str) -> None:
    conversion.carry_rows(ROWS)
    model_of(conversion)
    _call(conversion, name)
    noise_levels(conversion, name)
    updates = updates_of(conversion)
    method(conversion, name, updates)
    _batches(conversion)
    optimizer_of(conversion, updates)
    rewards(conversion)
    prompts_of(conversion, evaluates=False)
    conversion.carry("sampling.seed", "run.seed", conversion.settings.whole("sampling.seed") or 0)
    run_of(conversion)


def _call(conversion: Conversion, name: str) -> None:
    settings, family = conversion.settings, FAMILIES[name]
    for key in ("height", "width", *(["num_frames"] if family.video else [])):
        conversion.carry(f"sampling.{key}", f"model.call.{key}", settings.count(f"sampling.{key}"))
    scale = settings.number("sampling.guidance_scale")
    if not family.guidance:
        text = "the call has no guidance: a guider in the pipeline's folder has it, so set its guidance_scale there"
        conversion.lose("sampling.guidance_scale", text)
    elif name == "hunyuan_video":
        note = "divided by 1000: diffusers multiplies it by 1000 before the denoiser sees it, and UniRL does not"
        value = float(f"{(scale or 0.0) / 1000:.6g}")
        conversion.carry("sampling.guidance_scale", f"model.call.{family.guidance}", value, note)
    else:
        conversion.carry("sampling.guidance_scale", f"model.call.{family.guidance}", scale)
    if name == "qwen_image" and (scale or 0.0) > 1:
        conversion.follow("their pipeline of Qwen-Image", "model.call.negative_prompt", " ")
    if name == "wan22" and settings.value("sampling.guidance_scale_2") is not None:
        key = "sampling.guidance_scale_2"
        conversion.carry(key, "model.call.guidance_scale_2", settings.number(key))
    tokens = next((f"{at}max_sequence_length" for at in ("pipeline.", "bundle.config.")
                   if settings.has(f"{at}max_sequence_length")), None)  # fmt: skip
    if tokens is not None:
        conversion.carry(tokens, "model.call.max_sequence_length", settings.count(tokens))
    for key in settings.given:
        if key.startswith("sampling.sampler_kwargs."):
            conversion.lose(key, "if it is an argument of the pipeline's call, write it into model.call")
    if model_word(conversion.recipe["model"]["path"], ["i2v"]):
        conversion.want("the prompt file needs a column `image` with the path of a picture: see docs/own_model.md")


def _batches(conversion: Conversion) -> None:
    """One size of batch samples and trains here, so it is the one that fits into memory with gradients."""
    settings, key = conversion.settings, "stack.micro_batch_size"
    micro, group = settings.count(key), settings.count("sampling.samples_per_prompt")
    forward = conversion.recipe["objective"]["name"] == "forward"
    size = max(micro, group) if forward else micro
    note = "a loss of the forward process takes whole groups" if size != micro else "sampling too"
    conversion.carry(key, "rollout.batch", size, note)
    decode = next((at for at in ("rollout.forward_batch_size", "rollout.config.forward_batch_size")
                   if settings.value(at) is not None), None)  # fmt: skip
    if decode is None:
        conversion.follow("as many as are trained at once", "rollout.decode_batch", micro)
    else:
        conversion.carry(decode, "rollout.decode_batch", settings.count(decode), "only decoding")


def _same_params(conversion: Conversion) -> None:
    """The loss may have settings of the sampler of its own, which are the sampler's here."""
    settings, at = conversion.settings, "algorithm.params."
    own = [key for key in settings.given if key.startswith(at)]
    for key in own:
        same = key.replace(at, "sampling.", 1)
        conversion.used(key)
        if settings.value(same) != settings.value(key):
            conversion.lose(key, f"the loss has the settings of sampling here, and {named(same)} is another")
    if own:
        conversion.idle.append(Remark(at.rstrip("."), "the loss has the settings of sampling here"))
