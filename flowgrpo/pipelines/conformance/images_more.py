"""Tiny instances of more text-to-image classes, which are newer or share no components with others."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from . import autoencoders
from . import encoders as parts
from .images import euler, shifted_scheduler
from .tiny import Tiny

_SMALL = {"height": 16, "width": 16}
_GUIDED = {**_SMALL, "guidance_scale": 4.0, "negative_prompt": "blue"}


def _prx_transformer(channels: int) -> Any:
    return diffusers.PRXTransformer2DModel(
        in_channels=channels,
        patch_size=2,
        context_in_dim=16,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=2,
        axes_dim=[4, 4],
    )


def _prx() -> Any:
    return diffusers.PRXPipeline(
        transformer=_prx_transformer(4),
        scheduler=euler(),
        text_encoder=parts.t5_gemma(),
        tokenizer=parts.tokenizer(),
        vae=autoencoders.kl(),
        default_sample_size=16,
    )


def _prx_pixel() -> Any:
    return diffusers.PRXPixelPipeline(
        transformer=_prx_transformer(3),
        scheduler=euler(),
        text_encoder=parts.qwen3_vl("Qwen3VLModel").language_model,
        tokenizer=parts.tokenizer(max_length=256),
    )


def _bria() -> Any:
    transformer = diffusers.BriaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[2, 2, 4],
    )
    return diffusers.BriaPipeline(
        transformer=transformer,
        scheduler=shifted_scheduler(),
        vae=autoencoders.kl(shift=None),
        text_encoder=parts.t5(32),
        tokenizer=parts.tokenizer(),
    )


def bria_fibo_parts() -> dict[str, Any]:
    """Components of the Bria Fibo family."""
    transformer = diffusers.BriaFiboTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[2, 2, 4],
        text_encoder_dim=16,
    )
    return {
        "transformer": transformer,
        "scheduler": shifted_scheduler(),
        # This is the autoencoder of Wan 2.2, because the class assumes sixteen pixels for a latent.
        "vae": autoencoders.wan(in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16),
        "text_encoder": parts.language_model("SmolLM3ForCausalLM", "SmolLM3Config"),
        "tokenizer": parts.tokenizer(),
    }


def _ovis() -> Any:
    transformer = diffusers.OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    return diffusers.OvisImagePipeline(
        scheduler=shifted_scheduler(),
        vae=autoencoders.kl(),
        text_encoder=parts.language_model("Qwen3Model", "Qwen3Config"),
        tokenizer=parts.long_tokenizer(),
        transformer=transformer,
    )


def longcat_parts() -> dict[str, Any]:
    """Components of the LongCat-Image family."""
    transformer = diffusers.LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=[4, 4, 8],
    )
    return {
        "scheduler": shifted_scheduler(),
        "vae": autoencoders.kl(16),
        "text_encoder": parts.qwen2_5_vl(),
        "tokenizer": parts.long_tokenizer(),
        "text_processor": parts.qwen2_vl_processor(),
        "transformer": transformer,
    }


def kandinsky5_parts(vae: Any, *, conditioned: bool = False) -> dict[str, Any]:
    """Components of the Kandinsky 5 family."""
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=16,
        time_dim=32,
        patch_size=(1, 2, 2),
        model_dim=16,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(2, 2, 4),
        visual_cond=conditioned,
        attention_type="regular",
    )
    return {
        "transformer": transformer,
        "vae": vae,
        "text_encoder": parts.qwen2_5_vl(),
        "tokenizer": parts.qwen2_vl_processor(),
        "text_encoder_2": parts.clip_text(positions=77),
        "tokenizer_2": parts.clip_tokenizer(),
        "scheduler": euler(5.0),
    }


def few_resolutions(pipe: Any) -> None:
    """Replace the fixed list of resolutions, which are large."""
    pipe.resolutions = [(64, 64)]


def _ernie() -> Any:
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=32,
        in_channels=16,
        out_channels=16,
        text_in_dim=16,
        rope_axes_dim=(8, 4, 4),
    )
    return diffusers.ErnieImagePipeline(
        transformer=transformer,
        vae=autoencoders.flux2(),
        text_encoder=parts.mistral3("Mistral3Model"),
        tokenizer=parts.tokenizer(),
        scheduler=euler(4.0),
    )


def _krea2() -> Any:
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    return diffusers.Krea2Pipeline(
        scheduler=shifted_scheduler(),
        vae=autoencoders.qwenimage(),
        text_encoder=parts.qwen3_vl("Qwen3VLModel"),
        tokenizer=parts.long_tokenizer(),
        transformer=transformer,
        text_encoder_select_layers=(1, 2),
    )


def _nucleus() -> Any:
    transformer = diffusers.NucleusMoEImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
        moe_enabled=True,
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=16,
        capacity_factors=2.0,
    )
    for name, parameter in transformer.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            # The class does not initialise the experts' weights.
            torch.nn.init.normal_(parameter, std=0.1)
    return diffusers.NucleusMoEImagePipeline(
        transformer=transformer,
        scheduler=euler(),
        vae=autoencoders.qwenimage(),
        text_encoder=parts.qwen3_vl(layers=3),
        processor=parts.qwen3_vl_processor(),
    )


def _omnigen() -> Any:
    transformer = diffusers.OmniGenTransformer2DModel(
        in_channels=4,
        patch_size=2,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        num_layers=2,
        pad_token_id=parts.PAD,
        vocab_size=parts.VOCAB,
        pos_embed_max_size=16,
        time_step_dim=16,
        rope_scaling={"long_factor": [1.0] * 4, "short_factor": [1.0] * 4, "type": "su"},
    )
    return diffusers.OmniGenPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True, num_train_timesteps=1),
        vae=autoencoders.kl(levels=4, shift=None),
        tokenizer=parts.long_tokenizer(),
    )


def _ideogram_transformer(layers: int) -> Any:
    return diffusers.Ideogram4Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        intermediate_size=32,
        adaln_dim=16,
        llm_features_dim=layers * parts.WIDTH,
        mrope_section=(2, 1, 1),
    )


def _ideogram4() -> Any:
    from diffusers.pipelines.ideogram4 import pipeline_ideogram4

    layers = pipeline_ideogram4.QWEN3_VL_ACTIVATION_LAYERS
    return diffusers.Ideogram4Pipeline(
        scheduler=euler(1.0),
        vae=autoencoders.flux2(),
        text_encoder=parts.qwen3_vl("Qwen3VLModel", layers=max(layers) + 1),
        tokenizer=parts.long_tokenizer(),
        transformer=_ideogram_transformer(len(layers)),
        unconditional_transformer=_ideogram_transformer(len(layers)),
    )


IMAGES_MORE: dict[str, Tiny] = {
    "PRXPipeline": Tiny(
        _prx,
        {**_GUIDED, "use_resolution_binning": False},
        load=lambda: {"text_encoder": parts.t5_gemma()},
        notes="the text encoder is passed as an object, because the library cannot load the folder that it saved",
    ),
    "PRXPixelPipeline": Tiny(_prx_pixel, {**_GUIDED, "use_resolution_binning": False}),
    "BriaPipeline": Tiny(_bria, {"height": 32, "width": 32, "negative_prompt": "blue", "max_sequence_length": 16}),
    "BriaFiboPipeline": Tiny(
        lambda: diffusers.BriaFiboPipeline(**bria_fibo_parts()),
        {"height": 64, "width": 64, "negative_prompt": "blue", "max_sequence_length": 32},
        since="0.39",  # an older version returns the pictures of several rows as arrays of numpy
    ),
    "OvisImagePipeline": Tiny(_ovis, {**_GUIDED, "max_sequence_length": 128}),
    "LongCatImagePipeline": Tiny(
        lambda: diffusers.LongCatImagePipeline(**longcat_parts()),
        {**_GUIDED, "enable_prompt_rewrite": False},
        adjust=lambda pipe: setattr(pipe, "tokenizer_max_length", 32),
    ),
    "Kandinsky5T2IPipeline": Tiny(
        lambda: diffusers.Kandinsky5T2IPipeline(**kandinsky5_parts(autoencoders.kl(levels=4, shift=None))),
        {"height": 64, "width": 64, "guidance_scale": 4.0, "negative_prompt": "blue", "max_sequence_length": 256},
        adjust=few_resolutions,
    ),
    "ErnieImagePipeline": Tiny(_ernie, {**_GUIDED, "use_pe": False}),
    "Krea2Pipeline": Tiny(_krea2, {**_GUIDED, "max_sequence_length": 256}),
    "NucleusMoEImagePipeline": Tiny(_nucleus, {**_GUIDED, "max_sequence_length": 256, "return_index": -2}),
    "OmniGenPipeline": Tiny(_omnigen, {"height": 64, "width": 64, "guidance_scale": 2.5}),
    "Ideogram4Pipeline": Tiny(
        _ideogram4, {**_SMALL, "guidance_scale": 4.0, "guidance_schedule": None, "max_sequence_length": 48}
    ),
}
