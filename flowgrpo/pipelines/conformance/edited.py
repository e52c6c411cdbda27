"""Tiny instances of further classes that edit or refine a picture."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders
from . import encoders as parts
from .conditioned import picture
from .images import euler
from .images_more import bria_fibo_parts, few_resolutions, kandinsky5_parts
from .images_single import hunyuan_image_transformer
from .subject import TEXTS
from .tiny import Tiny

_GUIDED = {"guidance_scale": 4.0, "negative_prompt": "blue"}


def _kandinsky5() -> Any:
    # The class assumes eight pixels for a latent.
    vae = autoencoders.kl(levels=4, shift=None)
    return diffusers.Kandinsky5I2IPipeline(**kandinsky5_parts(vae, conditioned=True))


def _hunyuan_refiner() -> Any:
    return diffusers.HunyuanImageRefinerPipeline(
        scheduler=euler(4.0),
        vae=autoencoders.hunyuan_refiner(),
        text_encoder=parts.qwen2_5_vl(layers=3),
        tokenizer=parts.long_tokenizer(),
        transformer=hunyuan_image_transformer(
            in_channels=16,
            out_channels=8,
            patch_size=(1, 1, 1),
            rope_axes_dim=(2, 2, 4),
            text_embed_2_dim=None,
            guidance_embeds=True,
        ),
        guider=diffusers.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_momentum=None),
    )


EDITED: dict[str, Tiny] = {
    "BriaFiboEditPipeline": Tiny(
        lambda: diffusers.BriaFiboEditPipeline(**bria_fibo_parts()),
        {**_GUIDED, "height": 64, "width": 64, "image": picture(64), "_auto_resize": False, "max_sequence_length": 64},
        notes="its prompts are JSON with an `edit_instruction`",
        texts=tuple(f'{{"edit_instruction": "{text}"}}' for text in TEXTS),
        since="0.41",  # an older version takes no list of prompts
    ),
    "Kandinsky5I2IPipeline": Tiny(
        _kandinsky5,
        {**_GUIDED, "height": 64, "width": 64, "image": picture(64), "max_sequence_length": 512},
        adjust=few_resolutions,
    ),
    "HunyuanImageRefinerPipeline": Tiny(
        _hunyuan_refiner,
        {"height": 32, "width": 32, "negative_prompt": "blue", "image": picture(32)},
        # Its template alone has more than 100 tokens here.
        adjust=lambda pipe: setattr(pipe, "tokenizer_max_length", 128),
        notes="with `adaptive_projected_guidance_momentum` None: with momentum, guidance depends on earlier steps",
    ),
}
