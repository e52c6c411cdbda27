"""Tiny instances of the classes that paste the known part of a picture into each state."""

from __future__ import annotations

from typing import Any

import diffusers

from .conditioned import FLUX, PAINTED, QWEN, STRENGTH_NOTE, flux_controlnet, picture, qwen_edit
from .images import chroma_parts, flux2_klein_parts, flux_parts, qwenimage_parts, sd3_parts, zimage_parts
from .noise_predicting import stable_diffusion, stable_diffusion_xl
from .tiny import Tiny

_WHOLE: dict[str, Any] = {**PAINTED, "strength": 1.0}
_FLUX: dict[str, Any] = {**FLUX, **_WHOLE}
_GUIDED: dict[str, Any] = {"height": 16, "width": 16, "guidance_scale": 4.0, "negative_prompt": "blue", **_WHOLE}

INPAINTED: dict[str, Tiny] = {
    "FluxInpaintPipeline": Tiny(lambda: diffusers.FluxInpaintPipeline(**flux_parts()), _FLUX, notes=STRENGTH_NOTE),
    "FluxKontextInpaintPipeline": Tiny(
        lambda: diffusers.FluxKontextInpaintPipeline(**flux_parts()),
        {**_FLUX, "_auto_resize": False, "max_area": 256},
        notes=STRENGTH_NOTE,
    ),
    "FluxControlInpaintPipeline": Tiny(
        lambda: diffusers.FluxControlInpaintPipeline(**flux_parts(32, 16)),
        {**_FLUX, "control_image": picture(phase=3)},
        notes=STRENGTH_NOTE,
    ),
    "FluxControlNetInpaintPipeline": Tiny(
        lambda: flux_controlnet("FluxControlNetInpaintPipeline"),
        {**_FLUX, "control_image": picture(phase=3)},
        notes=STRENGTH_NOTE,
    ),
    "Flux2KleinInpaintPipeline": Tiny(
        lambda: diffusers.Flux2KleinInpaintPipeline(**flux2_klein_parts()),
        {**_WHOLE, "height": 16, "width": 16, "max_sequence_length": 64, "text_encoder_out_layers": (1, 2)},
        notes=STRENGTH_NOTE,
    ),
    "StableDiffusion3InpaintPipeline": Tiny(
        lambda: diffusers.StableDiffusion3InpaintPipeline(**sd3_parts(16)),
        {**_GUIDED, "max_sequence_length": 16},
        notes=STRENGTH_NOTE,
    ),
    "QwenImageInpaintPipeline": Tiny(
        lambda: diffusers.QwenImageInpaintPipeline(**qwenimage_parts()), {**QWEN, **_WHOLE}, notes=STRENGTH_NOTE
    ),
    "QwenImageEditInpaintPipeline": Tiny(
        lambda: qwen_edit("QwenImageEditInpaintPipeline"),
        {**{k: v for k, v in QWEN.items() if k not in ("height", "width")}, **_WHOLE},
        notes=STRENGTH_NOTE,
    ),
    "ZImageInpaintPipeline": Tiny(
        lambda: diffusers.ZImageInpaintPipeline(**zimage_parts()),
        {**_GUIDED, "max_sequence_length": 48},
        notes=STRENGTH_NOTE,
    ),
    "ChromaInpaintPipeline": Tiny(
        lambda: diffusers.ChromaInpaintPipeline(**chroma_parts()), {**_GUIDED, "max_sequence_length": 16}
    ),
    "StableDiffusionInpaintPipeline": Tiny(
        lambda: stable_diffusion("StableDiffusionInpaintPipeline"), _GUIDED, notes="predicts the noise"
    ),
    "StableDiffusionXLInpaintPipeline": Tiny(
        lambda: stable_diffusion_xl("StableDiffusionXLInpaintPipeline"),
        _GUIDED,
        notes="predicts the noise",
    ),
}
