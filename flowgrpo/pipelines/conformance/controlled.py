"""Tiny instances of further classes that take a control image or a mask."""

from __future__ import annotations

from typing import Any

import diffusers

from .conditioned import STRENGTH_NOTE, VIDEO, awake, flux_controlnet, mask, picture, qwen_controlnet, sd3_controlnet
from .images import SANA, SANA_SIZES, flux_parts, sana_parts, sd3_parts, zimage_parts
from .tiny import Tiny
from .videos import easyanimate_parts

_SMALL = {"height": 16, "width": 16}
_GUIDED = {**_SMALL, "guidance_scale": 4.0, "negative_prompt": "blue"}
_FLUX = {**_SMALL, "guidance_scale": 3.5, "max_sequence_length": 16, "strength": 1.0}


def _sana_controlnet() -> Any:
    controlnet = diffusers.SanaControlNetModel(num_layers=1, **SANA_SIZES)
    return diffusers.SanaControlNetPipeline(**sana_parts(), controlnet=awake(controlnet))


def _zimage_controlnet(kind: str, channels: int) -> Any:
    controlnet = diffusers.ZImageControlNetModel(
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=channels,
        add_control_noise_refiner="control_noise_refiner",
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )
    return getattr(diffusers, kind)(**zimage_parts(), controlnet=awake(controlnet))


CONTROLLED: dict[str, Tiny] = {
    "FluxControlImg2ImgPipeline": Tiny(
        lambda: diffusers.FluxControlImg2ImgPipeline(**flux_parts(32, 16)),
        {**_FLUX, "image": picture(), "control_image": picture(phase=3)},
        notes=STRENGTH_NOTE,
    ),
    "FluxControlNetImg2ImgPipeline": Tiny(
        lambda: flux_controlnet("FluxControlNetImg2ImgPipeline"),
        {**_FLUX, "image": picture(), "control_image": picture(phase=3)},
        notes=STRENGTH_NOTE,
    ),
    "StableDiffusion3ControlNetInpaintingPipeline": Tiny(
        lambda: sd3_controlnet("StableDiffusion3ControlNetInpaintingPipeline", extra=1),
        {**_GUIDED, "control_image": picture(), "control_mask": mask(), "max_sequence_length": 16},
    ),
    "StableDiffusion3PAGImg2ImgPipeline": Tiny(
        lambda: diffusers.StableDiffusion3PAGImg2ImgPipeline(**sd3_parts(), pag_applied_layers=["blocks.0"]),
        {**_GUIDED, "image": picture(), "strength": 1.0, "pag_scale": 1.0, "max_sequence_length": 16},
        notes=STRENGTH_NOTE,
    ),
    "SanaControlNetPipeline": Tiny(_sana_controlnet, {**SANA, "control_image": picture(32)}),
    "ZImageControlNetPipeline": Tiny(
        lambda: _zimage_controlnet("ZImageControlNetPipeline", 4),
        {**_GUIDED, "control_image": picture(), "max_sequence_length": 48},
    ),
    "ZImageControlNetInpaintPipeline": Tiny(
        lambda: _zimage_controlnet("ZImageControlNetInpaintPipeline", 9),
        {
            **_GUIDED,
            "control_image": picture(),
            "image": picture(phase=3),
            "mask_image": mask(),
            "max_sequence_length": 48,
        },
    ),
    "QwenImageControlNetInpaintPipeline": Tiny(
        lambda: qwen_controlnet("QwenImageControlNetInpaintPipeline", extra=4),
        {
            **_SMALL,
            "true_cfg_scale": 3.0,
            "negative_prompt": "a blue square",
            "control_image": picture(),
            "control_mask": mask(),
        },
    ),
    "EasyAnimateInpaintPipeline": Tiny(
        lambda: diffusers.EasyAnimateInpaintPipeline(**easyanimate_parts(9)),
        VIDEO,
        notes="without a video, which the class takes as a tensor only",
    ),
}
