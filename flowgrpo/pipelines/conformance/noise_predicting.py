"""Tiny instances of classes whose models predict noise: Stable Diffusion 1 and 2, SDXL, PixArt-Sigma, CogVideoX.

Each instance has the noise levels and the solver of the released model.
"""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders
from . import encoders as parts
from .tiny import Tiny

_GUIDED = {"height": 16, "width": 16, "guidance_scale": 4.0, "negative_prompt": "blue"}
_LATENT = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def _unet(**settings: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        **{
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 2,
            **settings,
        }
    )


def stable_diffusion(kind: str = "StableDiffusionPipeline", scheduler: Any = None) -> Any:
    """A class of Stable Diffusion 1, with the solver of its release if no scheduler is given."""
    return getattr(diffusers, kind)(
        vae=autoencoders.kl(shift=None),
        text_encoder=parts.clip_text(),
        tokenizer=parts.clip_tokenizer(),
        unet=_unet(),
        scheduler=scheduler or diffusers.PNDMScheduler(skip_prk_steps=True, **_LATENT),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sd2() -> Any:
    return stable_diffusion(
        scheduler=diffusers.DDIMScheduler(
            prediction_type="v_prediction", clip_sample=False, set_alpha_to_one=False, **_LATENT,
        )
    )  # fmt: skip


def stable_diffusion_xl(kind: str = "StableDiffusionXLPipeline") -> Any:
    """A class of SDXL."""
    return getattr(diffusers, kind)(
        vae=autoencoders.kl(shift=None),
        text_encoder=parts.clip_text(),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.clip_text(projected=True),
        tokenizer_2=parts.clip_tokenizer(),
        unet=_unet(
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=4,
            transformer_layers_per_block=(1, 2),
            projection_class_embeddings_input_dim=6 * 4 + 16,
            cross_attention_dim=32,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(timestep_spacing="leading", **_LATENT),
        add_watermarker=False,
    )


def _pixart() -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=16,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=16,
        norm_num_groups=4,
        use_additional_conditions=False,
    )
    return diffusers.PixArtSigmaPipeline(
        tokenizer=parts.tokenizer(),
        text_encoder=parts.t5(),
        vae=autoencoders.kl(shift=None),
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_schedule="linear", timestep_spacing="linspace"),
    )


def _cogvideox() -> Any:
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=16,
        num_layers=2,
        sample_width=2,
        sample_height=2,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=16,
        use_rotary_positional_embeddings=True,
    )
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8,) * 4,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    return diffusers.CogVideoXPipeline(
        tokenizer=parts.tokenizer(),
        text_encoder=parts.t5(),
        vae=vae,
        transformer=transformer,
        scheduler=diffusers.CogVideoXDDIMScheduler(
            rescale_betas_zero_snr=True, clip_sample=False, prediction_type="v_prediction", snr_shift_scale=1.0,
            timestep_spacing="trailing", **{k: v for k, v in _LATENT.items() if k != "steps_offset"},
        ),
    )  # fmt: skip


NOISE_PREDICTING: dict[str, Tiny] = {
    "StableDiffusionPipeline": Tiny(
        stable_diffusion, _GUIDED, notes="predicts the noise; the release has PNDM, but DDIM's timesteps are used"
    ),
    "StableDiffusionPipeline, v-prediction": Tiny(_sd2, _GUIDED),
    "StableDiffusionXLPipeline": Tiny(
        stable_diffusion_xl, _GUIDED, notes="predicts the noise; the release has Euler, but DDIM's timesteps are used"
    ),
    "PixArtSigmaPipeline": Tiny(
        _pixart,
        {**_GUIDED, "use_resolution_binning": False, "max_sequence_length": 16, "clean_caption": False},
        notes="predicts the noise; the release has DPM-Solver++, but DDIM's timesteps are used",
    ),
    "CogVideoXPipeline": Tiny(
        _cogvideox, {**_GUIDED, "num_frames": 9, "max_sequence_length": 16}, notes="v-prediction"
    ),
}
