"""Tiny instances of the text-to-video classes, with latents of two frames."""

from __future__ import annotations

from typing import Any

import diffusers

from . import autoencoders
from . import encoders as parts
from .images import euler
from .images_more import kandinsky5_parts
from .tiny import Tiny

_SMALL = {"height": 32, "width": 32, "num_frames": 5}
_GUIDED = {**_SMALL, "guidance_scale": 4.0, "negative_prompt": "blue"}


def unipc(shift: float = 3.0) -> Any:
    """The scheduler of Wan, UniPC on flow sigmas. Its timesteps are integers, so they are not exactly 1000 sigma."""
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def wan_transformer(channels: int = 4, kind: str = "WanTransformer3DModel", **settings: Any) -> Any:
    """A transformer of the Wan family that predicts 4 channels."""
    return getattr(diffusers, kind)(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        **settings,
    )


def wan_parts(transformer: Any, **others: Any) -> dict[str, Any]:
    """Components of the Wan family."""
    return {
        "vae": autoencoders.wan(),
        "tokenizer": parts.tokenizer(),
        "text_encoder": parts.umt5(),
        "scheduler": unipc(),
        "transformer": transformer,
        **others,
    }


def _wan_two_experts() -> Any:
    experts = {"transformer": wan_transformer(), "transformer_2": wan_transformer()}
    return diffusers.WanPipeline(**wan_parts(**experts), boundary_ratio=0.875)


def _wan_5b() -> Any:
    return diffusers.WanPipeline(**wan_parts(wan_transformer()), expand_timesteps=True)


def hunyuan_video_parts(**settings: Any) -> dict[str, Any]:
    """Components of HunyuanVideo."""
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        **{
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "guidance_embeds": True,
            "text_embed_dim": 16,
            "pooled_projection_dim": 16,
            "rope_axes_dim": (2, 4, 4),
            **settings,
        }
    )
    return {
        "text_encoder": parts.language_model("LlamaModel", "LlamaConfig", layers=3),
        "tokenizer": parts.long_tokenizer(),
        "transformer": transformer,
        "vae": autoencoders.hunyuan_video(),
        "scheduler": euler(7.0),
        "text_encoder_2": parts.clip_text(positions=77),
        "tokenizer_2": parts.tokenizer(max_length=77, template="<bos> $A <eos>"),
    }


def hunyuan_video15_parts(**settings: Any) -> dict[str, Any]:
    """Components of HunyuanVideo 1.5."""
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        **{
            "in_channels": 9,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "mlp_ratio": 2.0,
            "text_embed_dim": 16,
            "text_embed_2_dim": 16,
            "image_embed_dim": 12,
            "rope_axes_dim": (2, 2, 4),
            "target_size": 16,
            "task_type": "t2v",
            **settings,
        }
    )
    return {
        "text_encoder": parts.qwen2_5_vl("Qwen2_5_VLTextModel", layers=3),
        "tokenizer": parts.long_tokenizer(),
        "transformer": transformer,
        "vae": autoencoders.hunyuan_video15(),
        "scheduler": euler(7.0),
        "text_encoder_2": parts.t5(),
        "tokenizer_2": parts.tokenizer(max_length=256),
        "guider": diffusers.ClassifierFreeGuidance(guidance_scale=4.0),
    }


def shorten_hunyuan15(pipe: Any) -> None:
    """Shorten the token lengths that are fixed in the class."""
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = 320, 16, 3


def ltx_parts() -> dict[str, Any]:
    """Components of the LTX-Video family."""
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=16,
    )
    return {
        "scheduler": euler(1.0, use_dynamic_shifting=True, base_image_seq_len=16, max_image_seq_len=64),
        "vae": autoencoders.ltx(),
        "text_encoder": parts.t5(),
        "tokenizer": parts.tokenizer(),
        "transformer": transformer,
    }


def _mochi() -> Any:
    transformer = diffusers.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=16,
        time_embed_dim=4,
        max_sequence_length=16,
    )
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=autoencoders.mochi(),
        text_encoder=parts.t5(),
        tokenizer=parts.tokenizer(),
        transformer=transformer,
    )


class NoSafetyChecker:
    """Replaces the guardrail of the Cosmos pipelines, which is a separate package, and accepts everything."""

    def to(self, device: Any) -> NoSafetyChecker:
        """The object itself; it has no weights to move."""
        return self

    def check_text_safety(self, prompt: str) -> bool:
        """True: every prompt is accepted."""
        return True

    def check_video_safety(self, video: Any) -> Any:
        """The video, unchanged."""
        return video


def cosmos_transformer(text: int = 16, channels: int = 4, **settings: Any) -> Any:
    """A transformer of the Cosmos family that predicts 4 channels."""
    return diffusers.CosmosTransformer3DModel(
        in_channels=channels,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=text,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        concat_padding_mask=True,
        **settings,
    )


def _cosmos25() -> Any:
    transformer = cosmos_transformer(
        channels=5, extra_pos_embed_type=None, use_crossattn_projection=True,
        crossattn_proj_in_channels=32, encoder_hidden_states_channels=16,
    )  # fmt: skip
    return diffusers.Cosmos2_5_PredictBasePipeline(
        text_encoder=parts.qwen2_5_vl(),
        tokenizer=parts.long_tokenizer(),
        transformer=transformer,
        vae=autoencoders.wan(),
        scheduler=unipc(),
        safety_checker=NoSafetyChecker(),
    )


def cosmos2(kind: str, channels: int = 4) -> Any:
    """A class of Cosmos-Predict2."""
    return getattr(diffusers, kind)(
        text_encoder=parts.t5(),
        tokenizer=parts.tokenizer(),
        transformer=cosmos_transformer(channels=channels),
        vae=autoencoders.wan(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        safety_checker=NoSafetyChecker(),
    )


def sana_video_parts() -> dict[str, Any]:
    """Components of the Sana video family."""
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=12,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=16,
        sample_size=4,
    )
    return {
        "tokenizer": parts.tokenizer(max_length=512, template="<bos> $A"),
        "text_encoder": parts.gemma2(),
        "vae": autoencoders.wan(),
        "transformer": transformer,
        "scheduler": diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
        ),
    }


def skyreels_transformer(channels: int = 4, **settings: Any) -> Any:
    """A transformer of the SkyReels V2 family."""
    return wan_transformer(channels, "SkyReelsV2Transformer3DModel", **settings)


def easyanimate_parts(channels: int = 4) -> dict[str, Any]:
    """Components of the EasyAnimate family."""
    transformer = diffusers.EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=channels,
        out_channels=4,
        patch_size=2,
        sample_width=8,
        sample_height=8,
        num_layers=2,
        mmdit_layers=2,
        time_embed_dim=8,
        text_embed_dim=16,
    )
    return {
        "vae": autoencoders.magvit(),
        "text_encoder": parts.qwen2_vl(),
        "tokenizer": parts.long_tokenizer(),
        "transformer": transformer,
        "scheduler": euler(),
    }


_TEXT = {"max_sequence_length": 16}
_SANA = {"use_resolution_binning": False, "complex_human_instruction": None}
_FRAMELESS = {name: value for name, value in _GUIDED.items() if name != "num_frames"}

EXPLODING = "predicts the noise at levels up to 80 (EDM)"

VIDEOS: dict[str, Tiny] = {
    "WanPipeline": Tiny(lambda: diffusers.WanPipeline(**wan_parts(wan_transformer())), {**_GUIDED, **_TEXT}),
    "WanPipeline, 2.2 with two experts": Tiny(_wan_two_experts, {**_GUIDED, **_TEXT}),
    "WanPipeline, 2.2 5B": Tiny(_wan_5b, {**_GUIDED, **_TEXT}),
    "HunyuanVideoPipeline": Tiny(
        lambda: diffusers.HunyuanVideoPipeline(**hunyuan_video_parts()), {**_SMALL, **_TEXT, "guidance_scale": 4.0}
    ),
    "HunyuanVideoPipeline, true guidance": Tiny(
        lambda: diffusers.HunyuanVideoPipeline(**hunyuan_video_parts()),
        {**_SMALL, **_TEXT, "true_cfg_scale": 3.0, "negative_prompt": "blue"},
    ),
    "HunyuanVideo15Pipeline": Tiny(
        lambda: diffusers.HunyuanVideo15Pipeline(**hunyuan_video15_parts()),
        {"height": 16, "width": 16, "num_frames": 5, "negative_prompt": "blue"},
        adjust=shorten_hunyuan15,
    ),
    "HunyuanVideo15Pipeline, no negative": Tiny(
        lambda: diffusers.HunyuanVideo15Pipeline(**hunyuan_video15_parts()),
        {"height": 16, "width": 16, "num_frames": 5},
        adjust=shorten_hunyuan15,
    ),
    "LTXPipeline": Tiny(lambda: diffusers.LTXPipeline(**ltx_parts()), {**_GUIDED, **_TEXT, "num_frames": 9}),
    "MochiPipeline": Tiny(_mochi, {**_GUIDED, **_TEXT, "num_frames": 7}, steps=4),
    "Kandinsky5T2VPipeline": Tiny(
        lambda: diffusers.Kandinsky5T2VPipeline(**kandinsky5_parts(autoencoders.hunyuan_video())),
        {**_GUIDED, "max_sequence_length": 512},
    ),
    "Cosmos2_5_PredictBasePipeline": Tiny(
        _cosmos25, {**_GUIDED, "max_sequence_length": 128}, load=lambda: {"safety_checker": NoSafetyChecker()}
    ),
    "Cosmos2TextToImagePipeline": Tiny(
        lambda: cosmos2("Cosmos2TextToImagePipeline"),
        {**_FRAMELESS, **_TEXT},
        load=lambda: {"safety_checker": NoSafetyChecker()},
        notes=EXPLODING,
    ),
    "SanaVideoPipeline": Tiny(
        lambda: diffusers.SanaVideoPipeline(**sana_video_parts()), {**_FRAMELESS, **_TEXT, **_SANA, "frames": 5}
    ),
    "SkyReelsV2Pipeline": Tiny(
        lambda: diffusers.SkyReelsV2Pipeline(**wan_parts(skyreels_transformer())), {**_GUIDED, **_TEXT}
    ),
    "EasyAnimatePipeline": Tiny(lambda: diffusers.EasyAnimatePipeline(**easyanimate_parts()), _GUIDED),
}
