"""Tiny instances of the newest text-to-image and text-to-video classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers

from . import autoencoders
from . import encoders as parts
from .conditioned import picture
from .images import euler, flux2_klein_parts, shifted_scheduler, zimage_parts
from .tiny import Tiny, installed
from .videos import unipc


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


def motif_video_transformer(**settings: Any) -> Any:
    """The transformer of Motif-Video."""
    return diffusers.MotifVideoTransformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        text_embed_dim=parts.WIDTH,
        rope_axes_dim=(2, 2, 4),
        **settings,
    )


def _motif_video() -> Any:
    return diffusers.MotifVideoPipeline(
        scheduler=shifted_scheduler(),
        vae=autoencoders.wan(),
        text_encoder=parts.t5_gemma2(),
        tokenizer=parts.tokenizer(),
        transformer=motif_video_transformer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=4.0),
    )


def _cosmos3() -> Any:
    transformer = diffusers.Cosmos3OmniTransformer(
        head_dim=8,
        hidden_size=16,
        intermediate_size=32,
        latent_channel=4,
        patch_latent_dim=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=1,
        vocab_size=parts.VOCAB,
        rope_axes_dim=(2, 1, 1),
    )
    return diffusers.Cosmos3OmniPipeline(
        transformer=transformer,
        text_tokenizer=parts.long_tokenizer(),
        vae=autoencoders.wan(),
        scheduler=unipc(),
        enable_safety_checker=False,
        default_use_system_prompt=False,
    )


def ltx2_parts() -> dict[str, Any]:
    """Components of the LTX-2 family."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=parts.WIDTH,
        rope_double_precision=False,
        rope_type="split",
    )
    connectors = LTX2TextConnectors(
        caption_channels=parts.WIDTH,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
        rope_theta=10000.0,
        rope_double_precision=False,
        causal_temporal_positioning=False,
        rope_type="split",
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=32,
        out_channels=2,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        leaky_relu_negative_slope=0.1,
        output_sampling_rate=16000,
    )
    return {
        "scheduler": euler(1.0, use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=1024),
        "vae": autoencoders.ltx2(),
        "audio_vae": autoencoders.ltx2_audio(),
        "text_encoder": parts.gemma3(),
        "tokenizer": parts.tokenizer(side="left"),
        "connectors": connectors,
        "transformer": transformer,
        "vocoder": vocoder,
    }


LTX2 = {
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "frame_rate": 25.0,
    "negative_prompt": "blue",
    "guidance_scale": 3.0,
    "max_sequence_length": 16,
    **({"spatio_temporal_guidance_blocks": [1]} if installed("0.38") else {}),
}
# Older versions of diffusers do not have the classes of these conditions.
_CONDITION = SimpleNamespace(frames=picture(32), index=0, strength=1.0, crf=None)
_REFERENCE = SimpleNamespace(frames=picture(32), strength=1.0)
_AT_STRENGTH_1 = "at strength 1 of the condition: below 1, its part of the first state is not noise"


def _kandinsky6() -> Any:
    transformer = diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=parts.WIDTH,
        in_text_dim2=parts.WIDTH,
        time_dim=32,
        model_dim=16,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(2, 2, 4),
        in_audio_dim=4,
        out_audio_dim=4,
        text_token_padding=True,
        ca_rope=True,
        cross_gates=True,
        fix_modulation=True,
        visual_token_type_num_embeddings=2,
    )
    return diffusers.Kandinsky6TI2VAPipeline(
        transformer=transformer,
        vae=autoencoders.hunyuan_video(),
        text_encoder=parts.qwen2_5_vl(),
        tokenizer=parts.qwen2_vl_processor(),
        text_encoder_2=parts.clip_text(positions=77),
        tokenizer_2=parts.clip_tokenizer(),
        scheduler=euler(5.0),
    )


def _dreamlite(kind: str) -> Any:
    unet = diffusers.DreamLiteUNetModel(
        block_out_channels=(8, 8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=2,
        encoder_hid_dim=parts.WIDTH,
        encoder_hid_dim_type="text_proj_rms",
        addition_embed_type="time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16,
        ff_mult=2,
    )
    vae = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    return getattr(diffusers, kind)(
        text_encoder=parts.qwen3_vl(),
        tokenizer=parts.long_tokenizer(),
        processor=parts.qwen3_vl_processor(),
        vae=vae,
        unet=unet,
        scheduler=shifted_scheduler(),
    )


def _zimage_omni() -> Any:
    return diffusers.ZImageOmniPipeline(
        **zimage_parts(siglip_feat_dim=parts.WIDTH),
        siglip=parts.siglip2_vision(),
        siglip_processor=parts.siglip2_image_processor(),
    )


RECENT: dict[str, Tiny] = {
    "LTX2Pipeline": Tiny(lambda: diffusers.LTX2Pipeline(**ltx2_parts()), LTX2),
    "LTX2ConditionPipeline": Tiny(lambda: diffusers.LTX2ConditionPipeline(**ltx2_parts()), LTX2),
    "LTX2ConditionPipeline, with a condition": Tiny(
        lambda: diffusers.LTX2ConditionPipeline(**ltx2_parts()),
        {**LTX2, "conditions": [_CONDITION]},
        notes=_AT_STRENGTH_1,
    ),
    "LTX2InContextPipeline": Tiny(lambda: diffusers.LTX2InContextPipeline(**ltx2_parts()), LTX2),
    "LTX2InContextPipeline, with a reference": Tiny(
        lambda: diffusers.LTX2InContextPipeline(**ltx2_parts()),
        {**LTX2, "conditions": [_CONDITION], "reference_conditions": [_REFERENCE]},
        notes=_AT_STRENGTH_1,
    ),
    "Cosmos3OmniPipeline": Tiny(
        _cosmos3,
        {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 4.0, "negative_prompt": "blue"},
    ),
    "Cosmos3OmniPipeline, with a picture": Tiny(
        _cosmos3,
        {
            "height": 32,
            "width": 32,
            "num_frames": 5,
            "guidance_scale": 4.0,
            "negative_prompt": "blue",
            "image": picture(32),
        },
    ),
    "QwenImage21Pipeline": Tiny(
        _qwen_image21,
        {"height": 64, "width": 64, "true_cfg_scale": 4.0, "negative_prompt": "blue", "use_kv_cache": False},
        notes="with `use_kv_cache` False, because a step rounds differently with the cache; pictures are put on white",
    ),
    "BriaFibo2Pipeline": Tiny(
        _bria_fibo2, {"height": 16, "width": 16, "guidance_scale": 4.0, "negative_prompt": "blue"}, adjust=_fewer_layers
    ),
    "MotifVideoPipeline": Tiny(
        _motif_video, {"height": 32, "width": 32, "num_frames": 5, "negative_prompt": "blue", "max_sequence_length": 16}
    ),
    "Kandinsky6TI2VAPipeline": Tiny(
        _kandinsky6,
        {
            "height": 32,
            "width": 32,
            "num_frames": 5,
            "guidance_scale": 4.0,
            "negative_prompt": "blue",
            "max_sequence_length": 1024,
            "sample_audio": False,
        },
        notes="with `sample_audio` False, because sound is a second state",
    ),
    "ZImageOmniPipeline": Tiny(
        _zimage_omni,
        {"height": 16, "width": 16, "guidance_scale": 4.0, "negative_prompt": "blue", "max_sequence_length": 48},
        notes="without pictures",
    ),
    "Flux2KleinKVPipeline": Tiny(
        lambda: diffusers.Flux2KleinKVPipeline(**flux2_klein_parts()),
        {"height": 16, "width": 16, "max_sequence_length": 64, "text_encoder_out_layers": (1, 2)},
        notes="without pictures: with pictures, keys and values of the first step go into all later steps",
    ),
    "DreamLitePipeline": Tiny(
        lambda: _dreamlite("DreamLitePipeline"),
        {"height": 16, "width": 16, "guidance_scale": 4.0, "negative_prompt": "blue"},
    ),
    "DreamLiteMobilePipeline": Tiny(lambda: _dreamlite("DreamLiteMobilePipeline"), {"height": 16, "width": 16}),
}
