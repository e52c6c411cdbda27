"""Tiny instances of further classes that make a video from a picture, or edit a video."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders
from . import encoders as parts
from .conditioned import VIDEO, picture
from .images import SANA, shifted_scheduler
from .recent import LTX2, ltx2_parts, motif_video_transformer
from .tiny import Tiny, installed
from .videos import (
    EXPLODING,
    NoSafetyChecker,
    cosmos2,
    hunyuan_video_parts,
    sana_video_parts,
    unipc,
    wan_parts,
    wan_transformer,
)

_FILM = [picture(32, k) for k in range(5)]


def _lucy() -> Any:
    return diffusers.LucyEditPipeline(**wan_parts(wan_transformer(8)))


def _chrono_edit() -> Any:
    transformer = wan_transformer(
        12, "ChronoEditTransformer3DModel", image_dim=16, added_kv_proj_dim=24, rope_temporal_skip_len=2
    )
    vision = {"image_encoder": parts.clip_vision(), "image_processor": parts.clip_image_processor()}
    return diffusers.ChronoEditPipeline(**wan_parts(transformer, **vision))


def _hunyuan_image_to_video(condition: str, channels: int) -> Any:
    components = hunyuan_video_parts(in_channels=channels, image_condition_type=condition, guidance_embeds=False)
    encoder, tokenizer = parts.llava()
    return diffusers.HunyuanVideoImageToVideoPipeline(
        **components | {"text_encoder": encoder, "tokenizer": tokenizer},
        image_processor=parts.clip_image_processor(),
    )


def _hunyuan_skyreels() -> Any:
    return diffusers.HunyuanSkyreelsImageToVideoPipeline(**hunyuan_video_parts(in_channels=8))


def _motif_image_to_video() -> Any:
    return diffusers.MotifVideoImage2VideoPipeline(
        scheduler=shifted_scheduler(),
        vae=autoencoders.wan(),
        text_encoder=parts.t5_gemma2(),
        tokenizer=parts.tokenizer(),
        transformer=motif_video_transformer(image_embed_dim=parts.WIDTH),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=4.0),
        feature_extractor=parts.siglip_image_processor(),
    )


_TEMPLATE = {
    "template": "<|start_header_id|>system<|end_header_id|><image>red<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>red",
    # `<|eot_id|>` of `encoders.llava`. Diffusers before 0.38 looks for this token where a later one looks for a name.
    "double_return_token_id": 515,
    "crop_start": 6,
    "image_emb_start": 3,
    "image_emb_end": 7,
    "image_emb_len": 4,
}
_HUNYUAN = {
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "true_cfg_scale": 3.0,
    "negative_prompt": "blue",
    "image": picture(32),
    "max_sequence_length": 32,
}

ANIMATED: dict[str, Tiny] = {
    "LTX2ImageToVideoPipeline": Tiny(
        lambda: diffusers.LTX2ImageToVideoPipeline(**ltx2_parts()),
        {**LTX2, "image": picture(32), **({"image_crf": 0} if installed("0.40") else {})},
    ),
    "Cosmos2VideoToWorldPipeline": Tiny(
        lambda: cosmos2("Cosmos2VideoToWorldPipeline", 5),
        {**VIDEO, "num_frames": 5, "image": picture(32), "max_sequence_length": 16},
        load=lambda: {"safety_checker": NoSafetyChecker()},
        notes=EXPLODING,
    ),
    "LucyEditPipeline": Tiny(_lucy, {**VIDEO, "video": _FILM, "max_sequence_length": 16}),
    "ChronoEditPipeline": Tiny(
        _chrono_edit,
        {**VIDEO, "image": picture(32), "max_sequence_length": 16},
        notes="without temporal reasoning, which drops frames midway",
    ),
    "HunyuanVideoImageToVideoPipeline": Tiny(
        lambda: _hunyuan_image_to_video("latent_concat", 9),
        {**_HUNYUAN, "num_frames": 9, "prompt_template": _TEMPLATE},
        notes="cuts the first four of `num_frames` frames off, which show the picture",
    ),
    "HunyuanVideoImageToVideoPipeline, as the first frame": Tiny(
        lambda: _hunyuan_image_to_video("token_replace", 4), {**_HUNYUAN, "prompt_template": _TEMPLATE}
    ),
    "HunyuanSkyreelsImageToVideoPipeline": Tiny(_hunyuan_skyreels, _HUNYUAN),
    "MotifVideoImage2VideoPipeline": Tiny(
        _motif_image_to_video,
        {
            "height": 32,
            "width": 32,
            "num_frames": 5,
            "negative_prompt": "blue",
            "image": picture(32),
            "max_sequence_length": 16,
        },
    ),
    "SanaImageToVideoPipeline": Tiny(
        lambda: diffusers.SanaImageToVideoPipeline(**sana_video_parts() | {"scheduler": unipc(8.0)}),
        {**SANA, "frames": 5, "image": picture(32)},
    ),
}
