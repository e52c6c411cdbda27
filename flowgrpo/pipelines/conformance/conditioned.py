"""Tiny instances of the classes that are conditioned on a picture, a mask or a video."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from . import autoencoders
from . import encoders as parts
from .images import (
    SANA,
    chroma_parts,
    cogview4_parts,
    euler,
    flux2_klein_parts,
    flux_parts,
    qwenimage_parts,
    sana_parts,
    sd3_parts,
    zimage_parts,
)
from .images_more import kandinsky5_parts, longcat_parts
from .tiny import Tiny
from .videos import (
    hunyuan_video15_parts,
    ltx_parts,
    shorten_hunyuan15,
    skyreels_transformer,
    wan_parts,
    wan_transformer,
)

_SMALL = {"height": 16, "width": 16}
VIDEO = {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 4.0, "negative_prompt": "blue"}


def picture(size: int = 16, phase: int = 0) -> Image.Image:
    """A picture of soft stripes."""
    y, x = np.mgrid[0:size, 0:size]
    planes = [128 + 100 * np.sin((phase + x + k * y) / (2 + k)) for k in range(3)]
    return Image.fromarray(np.stack(planes, -1).astype(np.uint8))


def mask(size: int = 16) -> Image.Image:
    """A mask for inpainting: the right half of the picture is white, which means that it is painted again."""
    values = np.zeros((size, size), np.uint8)
    values[:, size // 2 :] = 255
    return Image.fromarray(values)


STRENGTH_NOTE = "at strength 1: below 1 some steps are left out, and the self-check refuses the pipeline"
FLUX = {**_SMALL, "guidance_scale": 3.5, "max_sequence_length": 16}
PAINTED = {"image": picture(), "mask_image": mask()}
QWEN = {**_SMALL, "true_cfg_scale": 3.0, "negative_prompt": "a blue square"}
_GUIDED = {**_SMALL, "guidance_scale": 4.0, "negative_prompt": "blue"}


def qwen_edit(kind: str) -> Any:
    """A class of Qwen-Image that edits pictures."""
    # The class scales its picture to a million pixels. An autoencoder that divides each side by 64 leaves few tokens.
    components = {**qwenimage_parts(), "vae": autoencoders.qwenimage(7, 4), "processor": parts.qwen2_vl_processor()}
    return getattr(diffusers, kind)(**components)


def _wan_image_to_video(**settings: Any) -> Any:
    image: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": 24} if settings.pop("image_encoder", False) else {}
    channels = 4 if settings.get("expand_timesteps") else 12
    others: dict[str, Any] = {"image_encoder": None, "image_processor": None, "transformer_2": None}
    if image:
        others |= {"image_encoder": parts.clip_vision(), "image_processor": parts.clip_image_processor()}
    if "boundary_ratio" in settings:
        others["transformer_2"] = wan_transformer(channels)
    return diffusers.WanImageToVideoPipeline(**wan_parts(wan_transformer(channels, **image), **others), **settings)


def _wan_vace() -> Any:
    transformer = wan_transformer(kind="WanVACETransformer3DModel", vace_layers=[0, 1], vace_in_channels=72)
    return diffusers.WanVACEPipeline(**wan_parts(transformer, transformer_2=None))


def _hunyuan_video15_image_to_video() -> Any:
    vision = {"image_encoder": parts.siglip_vision(), "feature_extractor": parts.siglip_image_processor()}
    return diffusers.HunyuanVideo15ImageToVideoPipeline(
        **hunyuan_video15_parts(task_type="i2v", image_embed_dim=16), **vision
    )


def _skyreels_image_to_video() -> Any:
    vision = {"image_encoder": parts.clip_vision(projected=True), "image_processor": parts.clip_image_processor()}
    transformer = skyreels_transformer(12, image_dim=16, added_kv_proj_dim=24)
    return diffusers.SkyReelsV2ImageToVideoPipeline(**wan_parts(transformer, **vision))


def sd3_controlnet(kind: str = "StableDiffusion3ControlNetPipeline", extra: int = 0) -> Any:
    """A class of Stable Diffusion 3 with a ControlNet, which takes `extra` channels beside the latents."""
    components = sd3_parts()
    controlnet = diffusers.SD3ControlNetModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=8,
        extra_conditioning_channels=extra,
    )
    return getattr(diffusers, kind)(**components, controlnet=awake(controlnet))


def flux_controlnet(kind: str = "FluxControlNetPipeline") -> Any:
    """A class of FLUX.1 with a ControlNet."""
    components = flux_parts()
    controlnet = diffusers.FluxControlNetModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return getattr(diffusers, kind)(**components, controlnet=awake(controlnet))


def qwen_controlnet(kind: str = "QwenImageControlNetPipeline", extra: int = 0) -> Any:
    """A class of Qwen-Image with a ControlNet, which takes `extra` channels beside the latents."""
    components = qwenimage_parts()
    controlnet = diffusers.QwenImageControlNetModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
        extra_condition_channels=extra,
    )
    return getattr(diffusers, kind)(**components, controlnet=awake(controlnet))


def awake(module: Any) -> Any:
    """Move the zero-initialised outputs of a ControlNet, so that the ControlNet has an effect."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return module


CONDITIONED: dict[str, Tiny] = {
    "FluxKontextPipeline": Tiny(
        lambda: diffusers.FluxKontextPipeline(**flux_parts()),
        {**FLUX, "image": picture(), "_auto_resize": False, "max_area": 256},
    ),
    "FluxControlPipeline": Tiny(
        lambda: diffusers.FluxControlPipeline(**flux_parts(32, 16)), {**FLUX, "control_image": picture()}
    ),
    "FluxFillPipeline": Tiny(lambda: diffusers.FluxFillPipeline(**flux_parts(48, 16)), {**FLUX, **PAINTED}),
    "FluxImg2ImgPipeline": Tiny(
        lambda: diffusers.FluxImg2ImgPipeline(**flux_parts()),
        {**FLUX, "image": picture(), "strength": 1.0},
        notes=STRENGTH_NOTE,
    ),
    "FluxControlNetPipeline": Tiny(flux_controlnet, {**FLUX, "control_image": picture()}),
    "Flux2KleinPipeline, with a picture": Tiny(
        lambda: diffusers.Flux2KleinPipeline(**flux2_klein_parts()),
        {**_SMALL, "image": picture(64), "max_sequence_length": 64, "text_encoder_out_layers": (1, 2)},
    ),
    "StableDiffusion3Img2ImgPipeline": Tiny(
        lambda: diffusers.StableDiffusion3Img2ImgPipeline(**sd3_parts()),
        {**_GUIDED, "image": picture(), "strength": 1.0, "max_sequence_length": 16},
        notes=STRENGTH_NOTE,
    ),
    "StableDiffusion3ControlNetPipeline": Tiny(
        sd3_controlnet, {**_GUIDED, "control_image": picture(), "max_sequence_length": 16}
    ),
    "StableDiffusion3PAGPipeline": Tiny(
        lambda: diffusers.StableDiffusion3PAGPipeline(**sd3_parts(), pag_applied_layers=["blocks.0"]),
        {**_GUIDED, "pag_scale": 1.0, "max_sequence_length": 16},
    ),
    "QwenImageEditPipeline": Tiny(
        lambda: qwen_edit("QwenImageEditPipeline"), {**QWEN, "height": 512, "width": 512, "image": picture(64)}
    ),
    "QwenImageEditPlusPipeline": Tiny(
        lambda: qwen_edit("QwenImageEditPlusPipeline"),
        {**QWEN, "height": 512, "width": 512, "image": [picture(64)]},
    ),
    "QwenImageImg2ImgPipeline": Tiny(
        lambda: diffusers.QwenImageImg2ImgPipeline(**qwenimage_parts()),
        {**QWEN, "image": picture(), "strength": 1.0},
        notes=STRENGTH_NOTE,
    ),
    "QwenImageControlNetPipeline": Tiny(qwen_controlnet, {**QWEN, "control_image": picture()}),
    "ZImageImg2ImgPipeline": Tiny(
        lambda: diffusers.ZImageImg2ImgPipeline(**zimage_parts()),
        {**_GUIDED, "image": picture(), "strength": 1.0, "max_sequence_length": 48},
        notes=STRENGTH_NOTE,
    ),
    "ChromaImg2ImgPipeline": Tiny(
        lambda: diffusers.ChromaImg2ImgPipeline(**chroma_parts()),
        {**_GUIDED, "image": picture(), "strength": 1.0, "max_sequence_length": 16},
        notes=STRENGTH_NOTE,
    ),
    "CogView4ControlPipeline": Tiny(
        lambda: diffusers.CogView4ControlPipeline(**cogview4_parts(8)),
        {**_GUIDED, "control_image": picture(), "max_sequence_length": 16},
    ),
    "SanaPAGPipeline": Tiny(
        lambda: diffusers.SanaPAGPipeline(**sana_parts(), pag_applied_layers="blocks.0"), {**SANA, "pag_scale": 1.0}
    ),
    "LongCatImageEditPipeline": Tiny(
        lambda: diffusers.LongCatImageEditPipeline(**{**longcat_parts(), "vae": autoencoders.kl(16, levels=7)}),
        {"image": picture(64), "guidance_scale": 4.0, "negative_prompt": "blue"},
        adjust=lambda pipe: setattr(pipe, "tokenizer_max_length", 32),
    ),
    "WanImageToVideoPipeline": Tiny(
        lambda: _wan_image_to_video(image_encoder=True),
        {**VIDEO, "image": picture(32), "max_sequence_length": 16},
    ),
    "WanImageToVideoPipeline, 2.2 with two experts": Tiny(
        lambda: _wan_image_to_video(boundary_ratio=0.875), {**VIDEO, "image": picture(32), "max_sequence_length": 16}
    ),
    "WanImageToVideoPipeline, 2.2 5B": Tiny(
        lambda: _wan_image_to_video(expand_timesteps=True), {**VIDEO, "image": picture(32), "max_sequence_length": 16}
    ),
    "WanVideoToVideoPipeline": Tiny(
        lambda: diffusers.WanVideoToVideoPipeline(**wan_parts(wan_transformer())),
        {
            "height": 32,
            "width": 32,
            "video": [picture(32, k) for k in range(5)],
            "strength": 1.0,
            "guidance_scale": 4.0,
            "negative_prompt": "blue",
            "max_sequence_length": 16,
        },
        notes=STRENGTH_NOTE,
    ),
    "WanVACEPipeline": Tiny(
        _wan_vace,
        {**VIDEO, "video": [picture(32, k) for k in range(5)], "mask": [mask(32)] * 5, "max_sequence_length": 16},
    ),
    "SkyReelsV2ImageToVideoPipeline": Tiny(
        _skyreels_image_to_video, {**VIDEO, "image": picture(32), "max_sequence_length": 16}
    ),
    "HunyuanVideo15ImageToVideoPipeline": Tiny(
        _hunyuan_video15_image_to_video,
        {"image": picture(16), "num_frames": 5, "negative_prompt": "blue"},
        adjust=shorten_hunyuan15,
    ),
    "HunyuanVideo15ImageToVideoPipeline, no negative": Tiny(
        _hunyuan_video15_image_to_video, {"image": picture(16), "num_frames": 5}, adjust=shorten_hunyuan15
    ),
    "LTXImageToVideoPipeline": Tiny(
        lambda: diffusers.LTXImageToVideoPipeline(**ltx_parts()),
        {**VIDEO, "num_frames": 9, "image": picture(32), "max_sequence_length": 16},
    ),
    "LTXConditionPipeline": Tiny(
        lambda: diffusers.LTXConditionPipeline(**{**ltx_parts(), "scheduler": euler()}),
        {**VIDEO, "num_frames": 9, "max_sequence_length": 16},
    ),
    "LTXConditionPipeline, with a picture": Tiny(
        lambda: diffusers.LTXConditionPipeline(**{**ltx_parts(), "scheduler": euler()}),
        {**VIDEO, "num_frames": 9, "max_sequence_length": 16, "image": picture(32), "image_cond_noise_scale": 0.0},
        notes="with `image_cond_noise_scale` 0: above 0, each step adds noise to the picture",
    ),
    "Kandinsky5I2VPipeline": Tiny(
        lambda: diffusers.Kandinsky5I2VPipeline(**kandinsky5_parts(autoencoders.hunyuan_video(), conditioned=True)),
        {**VIDEO, "num_frames": 21, "image": picture(32), "max_sequence_length": 512},
    ),
}
