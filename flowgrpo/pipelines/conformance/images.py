"""Tiny instances of the text-to-image classes whose components other classes share: SD3, FLUX, Qwen-Image, Sana ….

If a class has guidance, guidance is on, with a negative prompt, because released models are used in this way.
"""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders
from . import encoders as parts
from .tiny import Tiny

_SMALL = {"height": 16, "width": 16}
_GUIDED = {**_SMALL, "guidance_scale": 4.0, "negative_prompt": "blue"}
SANA = {
    "height": 32,
    "width": 32,
    "guidance_scale": 4.0,
    "negative_prompt": "blue",
    "use_resolution_binning": False,
    "complex_human_instruction": None,
    "max_sequence_length": 16,
}


def shifted_scheduler() -> Any:
    """The scheduler of Flux and Qwen-Image, whose shift depends on the resolution."""
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=16, max_image_seq_len=64
    )


def euler(shift: float = 3.0, **settings: Any) -> Any:
    """The Euler scheduler with a constant shift."""
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift, **settings)


def sd3_parts(channels: int = 4) -> dict[str, Any]:
    """Components of the Stable Diffusion 3 family."""
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=channels,
        out_channels=channels,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    return {
        "transformer": transformer,
        "scheduler": euler(),
        "vae": autoencoders.kl(channels),
        "text_encoder": parts.clip_text(projected=True),
        "tokenizer": parts.clip_tokenizer(),
        "text_encoder_2": parts.clip_text(projected=True),
        "tokenizer_2": parts.clip_tokenizer(),
        "text_encoder_3": parts.t5(32),
        "tokenizer_3": parts.tokenizer(),
    }


def flux_parts(channels: int = 16, out_channels: int | None = None, *, guidance: bool = True) -> dict[str, Any]:
    """Components of the FLUX.1 family."""
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=channels,
        out_channels=out_channels,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 4, 8),
    )
    return {
        "scheduler": shifted_scheduler(),
        "vae": autoencoders.kl(),
        "text_encoder": parts.clip_text(),
        "tokenizer": parts.clip_tokenizer(),
        "text_encoder_2": parts.t5(32),
        "tokenizer_2": parts.tokenizer(),
        "transformer": transformer,
    }


def _flux2_transformer(text: int, *, guidance: bool) -> Any:
    return diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=text,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )


def _flux2() -> Any:
    return diffusers.Flux2Pipeline(
        scheduler=shifted_scheduler(),
        vae=autoencoders.flux2(),
        text_encoder=parts.mistral3(),
        tokenizer=parts.long_tokenizer(),
        transformer=_flux2_transformer(32, guidance=True),
    )


def flux2_klein_parts() -> dict[str, Any]:
    """Components of FLUX.2 klein."""
    return {
        "scheduler": shifted_scheduler(),
        "vae": autoencoders.flux2(),
        "text_encoder": parts.language_model("Qwen3ForCausalLM", "Qwen3Config"),
        "tokenizer": parts.long_tokenizer(),
        "transformer": _flux2_transformer(32, guidance=False),
    }


def qwenimage_parts(channels: int = 16) -> dict[str, Any]:
    """Components of the Qwen-Image family."""
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=channels,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    return {
        "scheduler": shifted_scheduler(),
        "vae": autoencoders.qwenimage(),
        "text_encoder": parts.qwen2_5_vl(),
        "tokenizer": parts.long_tokenizer(),
        "transformer": transformer,
    }


SANA_SIZES = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 16,
    "sample_size": 8,
}


def sana_parts() -> dict[str, Any]:
    """Components of the Sana family."""
    transformer = diffusers.SanaTransformer2DModel(patch_size=1, num_layers=2, **SANA_SIZES)
    # The release has a DPM-Solver with the sigmas of flow matching.
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return {
        "vae": autoencoders.deep_compression(),
        "tokenizer": parts.tokenizer(max_length=512, template="<bos> $A"),
        "text_encoder": parts.gemma2(),
        "transformer": transformer,
        "scheduler": scheduler,
    }


def cogview4_parts(channels: int = 4) -> dict[str, Any]:
    """Components of the CogView4 family."""
    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=channels,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=4,
        pos_embed_max_size=8,
        sample_size=8,
        rope_axes_dim=(8, 8),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    return {
        "tokenizer": parts.tokenizer(side="left"),
        "text_encoder": parts.language_model("GlmModel", "GlmConfig"),
        "vae": autoencoders.kl(shift=None),
        "transformer": transformer,
        "scheduler": scheduler,
    }


def chroma_parts() -> dict[str, Any]:
    """Components of the Chroma family."""
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    return {
        "scheduler": shifted_scheduler(),
        "vae": autoencoders.kl(),
        "text_encoder": parts.t5(32),
        "tokenizer": parts.tokenizer(),
        "transformer": transformer,
    }


def zimage_parts(**settings: Any) -> dict[str, Any]:
    """Components of the Z-Image family."""
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
        **settings,
    )
    return {
        "scheduler": euler(),
        "vae": autoencoders.kl(),
        "text_encoder": parts.language_model("Qwen3Model", "Qwen3Config"),
        "tokenizer": parts.long_tokenizer(),
        "transformer": transformer,
    }


IMAGES: dict[str, Tiny] = {
    "StableDiffusion3Pipeline": Tiny(
        lambda: diffusers.StableDiffusion3Pipeline(**sd3_parts()), {**_GUIDED, "max_sequence_length": 16}
    ),
    "FluxPipeline": Tiny(
        lambda: diffusers.FluxPipeline(**flux_parts()),
        {**_SMALL, "guidance_scale": 3.5, "max_sequence_length": 16},
    ),
    "FluxPipeline, true guidance": Tiny(
        lambda: diffusers.FluxPipeline(**flux_parts()),
        {**_SMALL, "true_cfg_scale": 3.0, "negative_prompt": "blue", "max_sequence_length": 16},
    ),
    "Flux2Pipeline": Tiny(
        _flux2, {**_SMALL, "guidance_scale": 4.0, "max_sequence_length": 256, "text_encoder_out_layers": (1, 2)}
    ),
    "Flux2KleinPipeline": Tiny(
        lambda: diffusers.Flux2KleinPipeline(**flux2_klein_parts()),
        {**_SMALL, "guidance_scale": 4.0, "max_sequence_length": 64, "text_encoder_out_layers": (1, 2)},
    ),
    "QwenImagePipeline": Tiny(
        lambda: diffusers.QwenImagePipeline(**qwenimage_parts()),
        {**_SMALL, "true_cfg_scale": 3.0, "negative_prompt": "a blue square"},
    ),
    "SanaPipeline": Tiny(lambda: diffusers.SanaPipeline(**sana_parts()), SANA),
    "CogView4Pipeline": Tiny(
        lambda: diffusers.CogView4Pipeline(**cogview4_parts()), {**_GUIDED, "max_sequence_length": 16}
    ),
    "ChromaPipeline": Tiny(lambda: diffusers.ChromaPipeline(**chroma_parts()), {**_GUIDED, "max_sequence_length": 16}),
    "ZImagePipeline": Tiny(lambda: diffusers.ZImagePipeline(**zimage_parts()), {**_GUIDED, "max_sequence_length": 48}),
}
