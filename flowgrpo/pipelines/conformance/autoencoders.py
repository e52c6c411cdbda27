"""Autoencoders at toy size, each of the class that a released pipeline uses.

The words twofold, fourfold and so on say by which factor an autoencoder reduces a side of the image.
"""

from __future__ import annotations

from typing import Any

import diffusers

_MEAN, _STD = (0.1, -0.1, 0.2, 0.0), (1.5, 0.8, 1.0, 1.2)


def kl(channels: int = 4, *, levels: int = 2, shift: float | None = 0.1, **settings: Any) -> Any:
    """`AutoencoderKL` that halves the image `levels - 1` times."""
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(8,) * levels,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=1.5,
        shift_factor=shift,
        **{"use_quant_conv": False, "use_post_quant_conv": False, **settings},
    )


def flux2(channels: int = 4) -> Any:
    """`AutoencoderKLFlux2`: twofold, without its own patches of 2x2."""
    return diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
    )


def qwenimage(levels: int = 2, width: int = 8) -> Any:
    """`AutoencoderKLQwenImage`."""
    return diffusers.AutoencoderKLQwenImage(
        base_dim=width,
        z_dim=4,
        dim_mult=[1] * levels,
        num_res_blocks=1,
        temperal_downsample=[False] * (levels - 1),
        latents_mean=list(_MEAN),
        latents_std=list(_STD),
    )


def qwenimage21() -> Any:
    """`AutoencoderKLQwenImage21`: sixteenfold, with an alpha channel."""
    return diffusers.AutoencoderKLQwenImage21(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=list(_MEAN),
        latents_std=list(_STD),
    )


def wan(channels: int = 4, **settings: Any) -> Any:
    """`AutoencoderKLWan`: eightfold in space, fourfold in time."""
    return diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=list(_MEAN) * (channels // 4),
        latents_std=list(_STD) * (channels // 4),
        **settings,
    )


def deep_compression() -> Any:
    """`AutoencoderDC`: fourfold."""
    return diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        upsample_block_type="interpolate",
        downsample_block_type="stride_conv",
        scaling_factor=0.4,
    )


def hunyuan_video(channels: int = 4) -> Any:
    """`AutoencoderKLHunyuanVideo`: eightfold in space, fourfold in time."""
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=channels,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )


def hunyuan_video15() -> Any:
    """`AutoencoderKLHunyuanVideo15`: fourfold in space and time."""
    return diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )


def hunyuan_image() -> Any:
    """`AutoencoderKLHunyuanImage`: fourfold."""
    return diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=4,
        sample_size=16,
        scaling_factor=0.75,
    )


def hunyuan_refiner() -> Any:
    """`AutoencoderKLHunyuanImageRefiner`: fourfold, with two frames in a latent."""
    return diffusers.AutoencoderKLHunyuanImageRefiner(
        latent_channels=4,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=1,
    )


def ltx() -> Any:
    """`AutoencoderKLLTXVideo`: eightfold in space and time."""
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=2,
    )


def ltx2() -> Any:
    """`AutoencoderKLLTX2Video`: twofold in space."""
    made = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    made.use_framewise_encoding = made.use_framewise_decoding = False
    return made


def ltx2_audio() -> Any:
    """`AutoencoderKLLTX2Audio`, of 8 mel bins."""
    return diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        dropout=0.0,
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        is_causal=True,
        mel_bins=8,
    )


def mochi() -> Any:
    """`AutoencoderKLMochi`: eightfold in space, sixfold in time."""
    return diffusers.AutoencoderKLMochi(
        latent_channels=12,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )


def magvit() -> Any:
    """`AutoencoderKLMagvit`: eightfold in space, fourfold in time."""
    return diffusers.AutoencoderKLMagvit(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("SpatialDownBlock3D", *("SpatialTemporalDownBlock3D",) * 3),
        up_block_types=("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3),
        layers_per_block=1,
        norm_num_groups=2,
        spatial_group_norm=False,
    )
