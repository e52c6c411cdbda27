"""Tiny instances of text-to-sound classes: Stable Audio 3, ACE-Step, LongCat-AudioDiT."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from . import encoders as parts
from .tiny import Tiny

_RATE = 4000
_LATENT = 8


def same() -> Any:
    """`AutoencoderSAME`: two channels of 4 kHz, and a latent of 8 channels for four samples."""
    made = diffusers.AutoencoderSAME(
        audio_channels=2,
        patch_size=2,
        encoder_channels=8,
        encoder_c_mults=(2,),
        encoder_strides=(2,),
        encoder_transformer_depths=(1,),
        latent_dim=_LATENT,
        use_differential_attention=False,
        dim_heads=4,
        ff_mult=2,
        sampling_rate=_RATE,
    )
    # Its branches begin at 0, so that every latent would be the same sound.
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def stable_audio_3(kind: str = "StableAudio3Pipeline") -> Any:
    """A pipeline of the Stable Audio 3 family."""
    from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder

    return getattr(diffusers, kind)(
        vae=same(),
        text_encoder=parts.t5_gemma_model(),
        tokenizer=parts.tokenizer(),
        duration_embedder=StableAudio3DurationEmbedder(output_dim=parts.WIDTH, fourier_dim=16),
        transformer=diffusers.StableAudio3DiTModel(
            io_channels=_LATENT,
            patch_size=1,
            embed_dim=32,
            depth=2,
            num_heads=4,
            cond_token_dim=parts.WIDTH,
            global_cond_dim=parts.WIDTH,
            local_add_cond_dim=5,
            timestep_features_dim=16,
            ff_mult=2,
            num_memory_tokens=3,
            use_differential_attention=False,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0, stochastic_sampling=True),
    )


def _longcat() -> Any:
    return diffusers.LongCatAudioDiTPipeline(
        vae=diffusers.LongCatAudioDiTVae(
            in_channels=1,
            channels=16,
            c_mults=[1, 2],
            strides=[2],
            latent_dim=_LATENT,
            encoder_latent_dim=16,
            downsampling_ratio=2,
            sample_rate=_RATE,
        ),
        text_encoder=parts.umt5(),
        tokenizer=parts.tokenizer(),
        transformer=diffusers.LongCatAudioDiTTransformer(
            dit_dim=64, dit_depth=2, dit_heads=4, dit_text_dim=parts.WIDTH, latent_dim=_LATENT, text_conv=False
        ),
    )


_QWEN = {
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "sliding_window": 16,
}


def _ace_step() -> Any:
    from diffusers.pipelines.ace_step import AceStepConditionEncoder

    return diffusers.AceStepPipeline(
        vae=diffusers.AutoencoderOobleck(
            encoder_hidden_size=6,
            downsampling_ratios=[4, 4],
            decoder_channels=3,
            decoder_input_channels=_LATENT,
            audio_channels=2,
            channel_multiples=[2, 4],
            # The class reads half a minute of silence, as 25 latents a second.
            sampling_rate=400,
        ),
        text_encoder=parts.language_model("Qwen3Model", "Qwen3Config"),
        tokenizer=parts.long_tokenizer(),
        transformer=diffusers.AceStepTransformer1DModel(
            hidden_size=parts.WIDTH,
            num_hidden_layers=2,
            in_channels=3 * _LATENT,
            audio_acoustic_hidden_dim=_LATENT,
            patch_size=2,
            **_QWEN,
        ),
        condition_encoder=AceStepConditionEncoder(
            hidden_size=parts.WIDTH,
            text_hidden_dim=parts.WIDTH,
            timbre_hidden_dim=_LATENT,
            num_lyric_encoder_hidden_layers=2,
            num_timbre_encoder_hidden_layers=2,
            **_QWEN,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    )


SOUNDS: dict[str, Tiny] = {
    "StableAudio3Pipeline": Tiny(stable_audio_3, {"duration": 0.03}),
    "StableAudio3Pipeline, base": Tiny(
        stable_audio_3, {"duration": 0.03, "guidance_scale": 4.0, "negative_prompt": "blue"}
    ),
    "AceStepPipeline": Tiny(
        _ace_step,
        {"audio_duration": 0.3, "lyrics": "one two three", "guidance_scale": 1.0},
        notes="with `guidance_scale` 1, for distilled models: above 1, guidance depends on earlier steps",
    ),
    "LongCatAudioDiTPipeline": Tiny(_longcat, {"audio_duration_s": 0.02, "guidance_scale": 4.0}),
}
