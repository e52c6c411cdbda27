"""Tiny instances of text-to-image classes: HunyuanImage, Lumina, AuraFlow, HiDream."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders
from . import encoders as parts
from .images import euler
from .tiny import Tiny

_GUIDED = {"height": 16, "width": 16, "guidance_scale": 4.0, "negative_prompt": "blue"}


def hunyuan_image_transformer(**settings: Any) -> Any:
    """A transformer of the HunyuanImage family."""
    return diffusers.HunyuanImageTransformer2DModel(
        **{
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "text_embed_2_dim": 16,
            "rope_axes_dim": (4, 4),
            **settings,
        }
    )


def _hunyuan_image() -> Any:
    return diffusers.HunyuanImagePipeline(
        scheduler=euler(5.0),
        vae=autoencoders.hunyuan_image(),
        text_encoder=parts.qwen2_5_vl(layers=3),
        tokenizer=parts.long_tokenizer(),
        text_encoder_2=parts.t5(),
        tokenizer_2=parts.tokenizer(max_length=128),
        transformer=hunyuan_image_transformer(),
        guider=diffusers.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_momentum=None),
    )


def _lumina2() -> Any:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(300, 16, 16),
        cap_feat_dim=16,
    )
    return diffusers.Lumina2Pipeline(
        transformer=transformer,
        scheduler=euler(6.0),
        vae=autoencoders.kl(levels=4),
        text_encoder=parts.gemma2(),
        tokenizer=parts.long_tokenizer(),
    )


def _lumina() -> Any:
    transformer = diffusers.LuminaNextDiT2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=16,
        num_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        learn_sigma=True,
        cross_attention_dim=16,
    )
    return diffusers.LuminaPipeline(
        transformer=transformer,
        scheduler=euler(6.0),
        vae=autoencoders.kl(levels=4),
        text_encoder=parts.language_model("GemmaModel", "GemmaConfig"),
        tokenizer=parts.long_tokenizer(),
    )


def _auraflow() -> Any:
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pos_embed_max_size=64,
    )
    return diffusers.AuraFlowPipeline(
        tokenizer=parts.tokenizer(),
        text_encoder=parts.umt5(),
        vae=autoencoders.kl(shift=None),
        transformer=transformer,
        scheduler=euler(1.73),
    )


def _hidream() -> Any:
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[32, 16],
        text_emb_dim=32,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16),
        llama_layers=[0, 1],
    )
    return diffusers.HiDreamImagePipeline(
        scheduler=euler(),
        vae=autoencoders.kl(),
        text_encoder=parts.clip_text(projected=True),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.clip_text(projected=True),
        tokenizer_2=parts.clip_tokenizer(),
        text_encoder_3=parts.t5(32),
        tokenizer_3=parts.tokenizer(),
        text_encoder_4=parts.language_model("LlamaForCausalLM", "LlamaConfig", attn_implementation="eager"),
        tokenizer_4=parts.tokenizer(),
        transformer=transformer,
    )


def _short_prompts(pipe: Any) -> None:
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 48, 16


def _few_pixels(pipe: Any) -> None:
    # The pipeline scales every requested size to the area of this size.
    pipe.default_sample_size = 8


IMAGES_SINGLE: dict[str, Tiny] = {
    "HunyuanImagePipeline": Tiny(
        _hunyuan_image,
        {"height": 32, "width": 32, "negative_prompt": "blue"},
        adjust=_short_prompts,
        notes="with `adaptive_projected_guidance_momentum` None: with momentum, guidance depends on earlier steps",
    ),
    "Lumina2Pipeline": Tiny(
        _lumina2, {"height": 32, "width": 32, "negative_prompt": "blue", "max_sequence_length": 256}
    ),
    "LuminaPipeline": Tiny(_lumina, {"height": 32, "width": 32, "negative_prompt": "blue"}),
    "AuraFlowPipeline": Tiny(_auraflow, {**_GUIDED, "max_sequence_length": 16}),
    "HiDreamImagePipeline": Tiny(_hidream, {**_GUIDED, "max_sequence_length": 16}, adjust=_few_pixels),
}
