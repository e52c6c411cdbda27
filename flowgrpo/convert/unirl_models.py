"""The models of UniRL: what a pipeline of diffusers calls their settings, and the noise levels that they have there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from .conversion import Conversion
from .foreign_settings import ForeignSettings, named

DANCE, FLOW, CPS = "DanceSDEStrategy", "FlowSDEStrategy", "CPSSDEStrategy"


@dataclass(frozen=True)
class Drawing:
    """A family of models of images or videos.

    Attributes:
        guidance: the call's argument that is their guidance_scale; empty if the call has none.
        strategy: the noise of the steps if the file names none.
        shift: the shift of the noise levels if the file names none; None if the resolution decides.
        channels, side, time: channels of a latent, and how many pixels and frames its numbers stand for.
        video: whether it makes videos.
    """

    guidance: str = "guidance_scale"
    strategy: str = FLOW
    shift: float | None = 3.0
    channels: int = 16
    side: int = 8
    time: int = 4
    video: bool = False

    def elements(self, height: int, width: int, frames: int) -> int:
        """Numbers of a latent."""
        times = (frames - 1) // self.time + 1 if self.video else 1
        return self.channels * times * (height // self.side) * (width // self.side)


FAMILIES: dict[str, Drawing] = {
    "sd3": Drawing(strategy=CPS),
    "qwen_image": Drawing(guidance="true_cfg_scale", shift=None),
    "z_image": Drawing(shift=6.0),
    "flux2_klein": Drawing(strategy=DANCE, shift=None, channels=128, side=16),
    "wan21": Drawing(strategy=DANCE, shift=5.0, video=True),
    "wan22": Drawing(strategy=DANCE, shift=5.0, video=True),
    "hunyuan_video": Drawing(strategy=DANCE, shift=5.0, video=True),
    "hunyuan_video15": Drawing("", DANCE, 5.0, channels=32, side=16, video=True),
}
"""The folder of a model in `unirl.models` -> its family."""
OF_TEXT = ("qwen3", "qwen_vl")
REFUSED = {
    "bagel": "BAGEL, which is no pipeline of diffusers",
    "hunyuan_image3": "HunyuanImage 3, which writes text before it draws and is no pipeline of diffusers",
}
"""Models that cannot be trained here, and why."""


def family_name(settings: ForeignSettings) -> str:
    """The folder of the model's code in `unirl.models`.

    Raises:
        ValueError: the file names no model, or one that cannot be trained here.
    """
    if not settings.has("bundle._target_"):
        parts = [key for key in ("diffusion", "ar") if any(name.startswith(f"{key}.") for name in settings.given)]
        what = (
            "it trains a language model that rewrites prompts together with an image model (prompt enhancement), and "
            "a run here trains one of them: the language model with the reward `rendered`, or the image model"
            if len(parts) == 2
            else "it has no section `bundle`, which names the model"
        )
        raise ValueError(
            f"{settings.place}: {what}; convert a configuration of examples/diffusion or examples/ar of UniRL"
        )
    words = (settings.text("bundle._target_") or "").split(".")
    name = words[2] if words[:2] == ["unirl", "models"] and len(words) > 3 else words[-1]
    if name in FAMILIES or name in OF_TEXT:
        return name
    why = REFUSED.get(name, f"{named(name)}, whose pipeline is not known here")
    raise ValueError(
        f"{settings.place}: bundle._target_ names {why}; these models can be trained: "
        f"{', '.join((*FAMILIES, *OF_TEXT))}. See docs/own_model.md for what a model needs"
    )


def noise_levels(conversion: Conversion, name: str) -> None:
    """The noise levels of a rollout, s t / (1 + (s - 1) t) for T equal steps of t from 1 to 0 in all families."""
    settings, family = conversion.settings, FAMILIES[name]
    keys = [key for key in ("pipeline.shift", "bundle.config.shift", "model_config.shift") if settings.has(key)]
    if family.shift is not None:
        if keys:
            conversion.carry(keys[0], "sampler.shift", settings.number(keys[0]))
        else:
            conversion.follow("the pipeline's own shift", "sampler.shift", family.shift)
    elif name == "qwen_image" and not is_folder(conversion.recipe["model"]["path"]):
        height, width = (settings.count(f"sampling.{key}") for key in ("height", "width"))
        tokens = (height // 16) * (width // 16)
        mu = 0.5 + (1.15 - 0.5) / (4096 - 256) * (tokens - 256)
        note = f"from {tokens} tokens of an image, as there; the scheduler of the model's folder has other numbers"
        shift = float(f"{math.exp(mu):.6g}")
        conversion.carry(["sampling.height", "sampling.width"], "sampler.shift", shift, note)
    elif name == "qwen_image":
        conversion.want(
            "the noise levels there come from the folder's scheduler without its shift_terminal; here they come from "
            "the pipeline itself, or from sampler.shift"
        )
    # The empirical shift of FLUX.2 is the pipeline's own.
    for key in keys if family.shift is None else keys[1:]:
        conversion.ignore(key, "the resolution decides, there too" if family.shift is None else "see pipeline.shift")


def is_folder(path: str) -> bool:
    """Whether a path of a model is a folder, and no hub id."""
    return path.startswith(("/", ".", "~")) or path.count("/") != 1 or Path(path).exists()
