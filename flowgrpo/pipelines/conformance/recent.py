"""Tiny instances of the text-to-image and text-to-video classes that came last."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders, parts
from .images import shifted_scheduler
from .tiny import Tiny


def _qwen_image21() -> Any:
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        context_in_dim=parts.WIDTH,
        axes_dims_rope=(2, 2, 4),
    )
    return diffusers.QwenImage21Pipeline(
        scheduler=shifted_scheduler(),
        vae=autoencoders.qwenimage21(),
        text_encoder=parts.qwen3_vl(),
        processor=parts.qwen3_vl_processor(),
        transformer=transformer,
    )


def _bria_fibo2() -> Any:
    transformer = diffusers.BriaFibo2Transformer2DModel(
        in_channels=4,
        dim=16,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=3 * parts.WIDTH,
        injection_layer_ids=(1,),
        perceiver_num_layers=1,
        min_num_gist_tokens=2,
        max_num_gist_tokens=4,
        gist_step=2,
        gist_min_text_len=2,
        gist_max_text_len=8,
        axes_dims=(4, 2, 2),
        axes_lens=(64, 16, 16),
    )
    return diffusers.BriaFibo2Pipeline(
        transformer=transformer,
        scheduler=shifted_scheduler(),
        vae=autoencoders.flux2(),
        text_encoder=parts.qwen3_vl(layers=3),
        processor=parts.qwen3_vl_processor(),
    )


def _fewer_layers(pipe: Any) -> None:
    pipe.text_encoder_out_layers = ((0, 1, 2), (1, 2, 3))


def _motif_video() -> Any:
    transformer = diffusers.MotifVideoTransformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        text_embed_dim=parts.WIDTH,
        rope_axes_dim=(2, 2, 4),
    )
    return diffusers.MotifVideoPipeline(
        scheduler=shifted_scheduler(),
        vae=autoencoders.wan(),
        text_encoder=parts.t5_gemma2(),
        tokenizer=parts.tokenizer(),
        transformer=transformer,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=4.0),
    )


RECENT: dict[str, Tiny] = {
    "QwenImage21Pipeline": Tiny(
        _qwen_image21,
        {"height": 64, "width": 64, "true_cfg_scale": 4.0, "negative_prompt": "blue", "use_kv_cache": False},
        notes="with `use_kv_cache` False, since a step rounds otherwise with it; pictures are laid on white",
    ),
    "BriaFibo2Pipeline": Tiny(
        _bria_fibo2, {"height": 16, "width": 16, "guidance_scale": 4.0, "negative_prompt": "blue"}, adjust=_fewer_layers
    ),
    "MotifVideoPipeline": Tiny(
        _motif_video, {"height": 32, "width": 32, "num_frames": 5, "negative_prompt": "blue", "max_sequence_length": 16}
    ),
}
