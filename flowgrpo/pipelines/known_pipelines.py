"""Shapes of pipelines that recipes may name by their id, so that they have an estimate before they are downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

T5_XXL, UMT5_XXL, QWEN_VL = 4_762_310_656, 5_680_910_336, 8_292_166_656
CLIP_L, CLIP_L_PROJECTED, CLIP_G = 123_060_480, 123_650_304, 694_659_840
MISTRAL_SMALL, QWEN3_4B, QWEN3_8B, LLAMA3_8B = 24_011_361_280, 4_022_468_096, 8_190_735_360, 7_504_924_672
GEMMA3_12B, QWEN_VL_TEXT, BYT5_SMALL, SIGLIP = 12_187_325_040, 7_070_619_136, 217_657_472, 428_225_600
LTX2_CONNECTORS, LTX2_SOUND, LTX2_VOCODER = 1_431_475_200, 53_248_146, 55_592_802
CLIP_H_VISION, CLIP_H_TOKENS = 630_766_080, 257
T5GEMMA_BASE, UMT5_BASE, QWEN3_EMBEDDING = 281_580_288, 281_861_376, 595_776_512
SA3_DURATION, ACE_CONDITIONS, ACE_TOKENIZERS = 197_376, 609_329_664, 210_043_974
_VAE = {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 16,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
_SD_VAE = {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 4,
}  # fmt: skip
CAUSAL_VAE: dict[str, Any] = {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4]}
_WAN22_VAE = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "in_channels": 12, "out_channels": 12, "patch_size": 2,
    "is_residual": True, "scale_factor_spatial": 16, "scale_factor_temporal": 4,
}  # fmt: skip
_WAN = {"attention_head_dim": 128, "text_dim": 4096, "freq_dim": 256}
_WAN_14B = {**_WAN, "num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
# The state, a mask of four channels, and the latents of the picture.
_WAN_PICTURE = {"in_channels": 16 + 4 + 16, "out_channels": 16}


@dataclass(frozen=True)
class Architecture:
    """What a pipeline is made of.

    Attributes:
        denoiser: class of diffusers, and its configuration.
        vae: class of diffusers, and its configuration.
        encoders: text encoder -> number of its parameters.
        experts: number of denoisers, each for a range of noise levels.
        image_encoders: image encoder -> number of its parameters.
        inputs: what the denoiser's configuration does not say about the denoiser's inputs: `image_tokens`, the tokens
            of a picture from its encoder; `expand_timesteps`, whether each token has a noise level; and of an edited
            picture, `picture_tokens` beside the state and `read_tokens` beside the text; of a video with sound,
            `sound_rate`, the tokens of a second; and `kept_width`, how many numbers of a token of a prompt are kept, if
            the pipeline makes the denoiser's input of them in each call.
        others: networks that stay on the card, beside denoiser, autoencoder and encoders -> number of their parameters.
        guider: evaluations of a state that the pipeline's guider asks for; None without a guider.
        one_evaluation: whether guidance never takes a second evaluation, because the model was distilled.
    """

    denoiser: tuple[str, Mapping[str, Any]]
    vae: tuple[str, Mapping[str, Any]]
    encoders: Mapping[str, int]
    experts: int = 1
    image_encoders: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    guider: int | None = None
    one_evaluation: bool = False
    others: Mapping[str, int] = field(default_factory=dict)


# These classes bring a picture to about a million pixels, whatever size the sample has. The tokens of its latents are
# beside the state. The text encoder of Qwen-Image reads the picture too, in squares of 28 pixels.
_MILLION, _READ_MILLION, _READ_SMALL = (1024 // 16) ** 2, 37**2, 14**2
EDITS: dict[str, dict[str, int]] = {
    "FluxKontextPipeline": {"picture_tokens": _MILLION},
    "FluxKontextInpaintPipeline": {"picture_tokens": _MILLION},
    "QwenImageEditPipeline": {"picture_tokens": _MILLION, "read_tokens": _READ_MILLION},
    "QwenImageEditInpaintPipeline": {"picture_tokens": _MILLION, "read_tokens": _READ_MILLION},
    "QwenImageEditPlusPipeline": {"picture_tokens": _MILLION, "read_tokens": _READ_SMALL},
}
"""Classes that edit a picture -> the tokens of one picture."""
EDITED = "picture_tokens", "read_tokens"
ONE_EVALUATION = frozenset({"Flux2Pipeline", "Flux2KleinKVPipeline"})
"""Classes that evaluate each state once, whatever the guidance."""


def _sd3(layers: int, **settings: Any) -> Architecture:
    """Stable Diffusion 3: a head of 64 channels for each layer."""
    sizes = {
        "num_layers": layers, "num_attention_heads": layers, "attention_head_dim": 64,
        "caption_projection_dim": 64 * layers, "joint_attention_dim": 4096, "pooled_projection_dim": 2048,
        "sample_size": 128,
    }  # fmt: skip
    return Architecture(
        ("SD3Transformer2DModel", {**sizes, **settings}),
        ("AutoencoderKL", _VAE),
        {"CLIP-L": CLIP_L_PROJECTED, "CLIP-G": CLIP_G, "T5-XXL": T5_XXL},
    )


_SD35_LARGE = _sd3(38, pos_embed_max_size=192, qk_norm="rms_norm")
_FLUX = Architecture(
    ("FluxTransformer2DModel", {"guidance_embeds": True}),
    ("AutoencoderKL", _VAE),
    {"CLIP-L": CLIP_L, "T5-XXL": T5_XXL},
)
_QWEN_IMAGE = Architecture(
    ("QwenImageTransformer2DModel", {}), ("AutoencoderKLQwenImage", CAUSAL_VAE), {"Qwen2.5-VL-7B": QWEN_VL}
)
_WAN21_T2V_14B = Architecture(
    ("WanTransformer3DModel", _WAN_14B),
    ("AutoencoderKLWan", CAUSAL_VAE),
    {"UMT5-XXL": UMT5_XXL},
)
_WAN21_I2V = Architecture(
    ("WanTransformer3DModel", {**_WAN_14B, **_WAN_PICTURE, "image_dim": 1280, "added_kv_proj_dim": 5120}),
    ("AutoencoderKLWan", CAUSAL_VAE),
    {"UMT5-XXL": UMT5_XXL},
    image_encoders={"CLIP-H": CLIP_H_VISION},
    inputs={"image_tokens": CLIP_H_TOKENS},
)
_FLUX2_VAE = {"block_out_channels": [128, 256, 512, 512], "latent_channels": 32}


def _klein(encoder: str, numbers: int, **sizes: int) -> Architecture:
    """A distilled FLUX.2 klein. The base models differ in one thing: their guidance takes a second evaluation."""
    return Architecture(
        ("Flux2Transformer2DModel", {"guidance_embeds": False, **sizes}),
        ("AutoencoderKLFlux2", _FLUX2_VAE),
        {encoder: numbers},
        one_evaluation=True,
    )


_KLEIN_4B = _klein(
    "Qwen3-4B", QWEN3_4B,
    num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680,
)  # fmt: skip
_KLEIN_9B = _klein(
    "Qwen3-8B", QWEN3_8B,
    num_layers=8, num_single_layers=24, num_attention_heads=32, joint_attention_dim=12288,
)  # fmt: skip


def _hunyuan_video15(target: int, guided: bool, picture: bool, **settings: Any) -> Architecture:
    """HunyuanVideo 1.5: `target` is the side of a square as large as its video. A distilled model is not guided."""
    return Architecture(
        ("HunyuanVideo15Transformer3DModel", {"target_size": target, **settings}),
        ("AutoencoderKLHunyuanVideo15", {"latent_channels": 32, "spatial_compression_ratio": 16}),
        {"Qwen2.5-VL-7B": QWEN_VL_TEXT, "ByT5-small": BYT5_SMALL},
        image_encoders={"SigLIP": SIGLIP} if picture else {},
        guider=2 if guided else 1,
    )


_STABLE_AUDIO3 = Architecture(
    ("StableAudio3DiTModel", {}),
    (
        "AutoencoderSAME",
        {
            "encoder_channels": 256, "encoder_transformer_depths": [12], "decoder_sinusoidal_blocks": [8],
            "latent_dim": 256, "patch_size": 256, "encoder_strides": [16], "sampling_rate": 44_100,
        },
    ),
    {"T5Gemma-base": T5GEMMA_BASE},
    others={"duration_embedder": SA3_DURATION},
)  # fmt: skip


def _ace_step(**sizes: int) -> Architecture:
    """A distilled ACE-Step 1.5, which takes no guidance."""
    return Architecture(
        ("AceStepTransformer1DModel", {"is_turbo": True, **sizes}),
        (
            "AutoencoderOobleck",
            {"downsampling_ratios": [2, 4, 4, 6, 10], "decoder_input_channels": 64, "sampling_rate": 48_000},
        ),
        {"Qwen3-Embedding-0.6B": QWEN3_EMBEDDING},
        one_evaluation=True,
        inputs={"kept_width": 1024},
        others={"condition_encoder": ACE_CONDITIONS, "tokenizers of sounds": ACE_TOKENIZERS},
    )


_HUNYUAN15 = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-"
_Z_IMAGE = Architecture(("ZImageTransformer2DModel", {}), ("AutoencoderKL", _VAE), {"Qwen3-4B": QWEN3_4B})
KNOWN = {
    "stabilityai/stable-diffusion-3-medium-diffusers": _sd3(24, pos_embed_max_size=192),
    "stabilityai/stable-diffusion-3.5-medium": _sd3(
        24, pos_embed_max_size=384, qk_norm="rms_norm", dual_attention_layers=list(range(13))
    ),
    "stabilityai/stable-diffusion-3.5-large": _SD35_LARGE,
    "stabilityai/stable-diffusion-3.5-large-turbo": _SD35_LARGE,
    "black-forest-labs/FLUX.1-dev": _FLUX,
    "black-forest-labs/FLUX.1-Krea-dev": _FLUX,
    "black-forest-labs/FLUX.1-schnell": replace(_FLUX, denoiser=("FluxTransformer2DModel", {})),
    "black-forest-labs/FLUX.1-Kontext-dev": replace(_FLUX, inputs=EDITS["FluxKontextPipeline"]),
    "black-forest-labs/FLUX.2-dev": Architecture(
        ("Flux2Transformer2DModel", {"guidance_embeds": True}),
        ("AutoencoderKLFlux2", _FLUX2_VAE),
        {"Mistral-Small-24B": MISTRAL_SMALL},
        one_evaluation=True,
    ),
    "black-forest-labs/FLUX.2-klein-4B": _KLEIN_4B,
    "black-forest-labs/FLUX.2-klein-base-4B": replace(_KLEIN_4B, one_evaluation=False),
    "black-forest-labs/FLUX.2-klein-9B": _KLEIN_9B,
    "black-forest-labs/FLUX.2-klein-base-9B": replace(_KLEIN_9B, one_evaluation=False),
    "Tongyi-MAI/Z-Image": _Z_IMAGE,
    "Tongyi-MAI/Z-Image-Turbo": _Z_IMAGE,
    "Qwen/Qwen-Image": _QWEN_IMAGE,
    "Qwen/Qwen-Image-2512": _QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit": replace(_QWEN_IMAGE, inputs=EDITS["QwenImageEditPipeline"]),
    "Qwen/Qwen-Image-Edit-2509": replace(_QWEN_IMAGE, inputs=EDITS["QwenImageEditPlusPipeline"]),
    "Qwen/Qwen-Image-Edit-2511": replace(
        _QWEN_IMAGE,
        denoiser=("QwenImageTransformer2DModel", {"zero_cond_t": True}),
        inputs=EDITS["QwenImageEditPlusPipeline"],
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Architecture(
        ("WanTransformer3DModel", {**_WAN, "num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}),
        ("AutoencoderKLWan", CAUSAL_VAE),
        {"UMT5-XXL": UMT5_XXL},
    ),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _WAN21_T2V_14B,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": replace(_WAN21_T2V_14B, experts=2),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Architecture(
        (
            "WanTransformer3DModel",
            {
                **_WAN, "num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336,
                "in_channels": 48, "out_channels": 48,
            },
        ),
        ("AutoencoderKLWan", _WAN22_VAE),
        {"UMT5-XXL": UMT5_XXL},
        inputs={"expand_timesteps": True},
    ),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": _WAN21_I2V,
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": _WAN21_I2V,
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Architecture(
        ("WanTransformer3DModel", {**_WAN_14B, **_WAN_PICTURE}),
        ("AutoencoderKLWan", CAUSAL_VAE),
        {"UMT5-XXL": UMT5_XXL},
        experts=2,
    ),
    "hunyuanvideo-community/HunyuanVideo": Architecture(
        ("HunyuanVideoTransformer3DModel", {}),
        ("AutoencoderKLHunyuanVideo", {"latent_channels": 16, "spatial_compression_ratio": 8}),
        {"LLaVA-Llama-3-8B": LLAMA3_8B, "CLIP-L": CLIP_L},
    ),
    f"{_HUNYUAN15}480p_t2v": _hunyuan_video15(640, True, False),
    f"{_HUNYUAN15}720p_t2v": _hunyuan_video15(960, True, False),
    f"{_HUNYUAN15}480p_t2v_distilled": _hunyuan_video15(640, False, False),
    f"{_HUNYUAN15}480p_i2v": _hunyuan_video15(640, True, True),
    f"{_HUNYUAN15}720p_i2v": _hunyuan_video15(960, True, True),
    f"{_HUNYUAN15}480p_i2v_distilled": _hunyuan_video15(640, False, True),
    f"{_HUNYUAN15}720p_i2v_distilled": _hunyuan_video15(960, False, True),
    f"{_HUNYUAN15}480p_i2v_step_distilled": _hunyuan_video15(640, False, True, use_meanflow=True),
    "Lightricks/LTX-2": Architecture(
        ("LTX2VideoTransformer3DModel", {"rope_type": "split"}),
        (
            "AutoencoderKLLTX2Video",
            {
                "latent_channels": 128, "decoder_causal": False,
                "spatial_compression_ratio": 32, "temporal_compression_ratio": 8,
            },
        ),
        {"Gemma-3-12B": GEMMA3_12B},
        # The hidden states of 48 layers and of the embedding.
        inputs={"sound_rate": 25, "kept_width": 49 * 3840},
        others={"connectors": LTX2_CONNECTORS, "audio_vae": LTX2_SOUND, "vocoder": LTX2_VOCODER},
    ),
    "stabilityai/stable-audio-3-medium": _STABLE_AUDIO3,
    "stabilityai/stable-audio-3-medium-base": _STABLE_AUDIO3,
    "Runware/acestep-v15-turbo-diffusers": _ace_step(),
    "ACE-Step/acestep-v15-xl-turbo-diffusers": _ace_step(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, encoder_hidden_size=2048,
    ),
    "ruixiangma/LongCat-AudioDiT-1B-Diffusers": Architecture(
        ("LongCatAudioDiTTransformer", {}),
        (
            "LongCatAudioDiTVae",
            {
                "c_mults": [1, 2, 4, 8, 16], "strides": [2, 4, 4, 8, 8], "latent_dim": 64,
                "downsampling_ratio": 2048, "sample_rate": 24_000,
            },
        ),
        {"UMT5-base": UMT5_BASE},
    ),
    "stable-diffusion-v1-5/stable-diffusion-v1-5": Architecture(
        ("UNet2DConditionModel", {"sample_size": 64, "cross_attention_dim": 768}),
        ("AutoencoderKL", _SD_VAE),
        {"CLIP-L": CLIP_L},
    ),
    "stabilityai/stable-diffusion-xl-base-1.0": Architecture(
        (
            "UNet2DConditionModel",
            {
                "sample_size": 128, "cross_attention_dim": 2048, "block_out_channels": [320, 640, 1280],
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                "attention_head_dim": [5, 10, 20], "transformer_layers_per_block": [1, 2, 10],
                "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
            },
        ),
        ("AutoencoderKL", _SD_VAE),
        {"CLIP-L": CLIP_L, "CLIP-G": CLIP_G},
    ),
}  # fmt: skip
"""Models that recipes may name by their id. A setting that is not listed has the default of its class."""
