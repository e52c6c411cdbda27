"""Shapes of pipelines without their weights, from the configurations of a folder or from the id of a known model."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..weights.json_files import read_json_object
from ..weights.pipeline_folders import is_part
from ..weights.precision import cast_base

T5_XXL, UMT5_XXL, QWEN_VL = 4_762_310_656, 5_680_910_336, 8_292_166_656
CLIP_L, CLIP_L_PROJECTED, CLIP_G = 123_060_480, 123_650_304, 694_659_840
CLIP_H_VISION, CLIP_H_TOKENS = 630_766_080, 257
_VAE = {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 16,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
_SD_VAE = {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 4,
}  # fmt: skip
_CAUSAL_VAE: dict[str, Any] = {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4]}
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
            picture, `picture_tokens` beside the state and `read_tokens` beside the text.
    """

    denoiser: tuple[str, Mapping[str, Any]]
    vae: tuple[str, Mapping[str, Any]]
    encoders: Mapping[str, int]
    experts: int = 1
    image_encoders: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)


# These classes bring a picture to about a million pixels, whatever size the sample has. The tokens of its latents are
# beside the state. The text encoder of Qwen-Image reads the picture too, in squares of 28 pixels.
_MILLION, _READ_MILLION, _READ_SMALL = (1024 // 16) ** 2, 37**2, 14**2
_EDITS: dict[str, dict[str, int]] = {
    "FluxKontextPipeline": {"picture_tokens": _MILLION},
    "FluxKontextInpaintPipeline": {"picture_tokens": _MILLION},
    "QwenImageEditPipeline": {"picture_tokens": _MILLION, "read_tokens": _READ_MILLION},
    "QwenImageEditInpaintPipeline": {"picture_tokens": _MILLION, "read_tokens": _READ_MILLION},
    "QwenImageEditPlusPipeline": {"picture_tokens": _MILLION, "read_tokens": _READ_SMALL},
}
"""Classes that edit a picture -> the tokens of one picture."""
_FLUX = Architecture(
    ("FluxTransformer2DModel", {"guidance_embeds": True}),
    ("AutoencoderKL", _VAE),
    {"CLIP-L": CLIP_L, "T5-XXL": T5_XXL},
)
_QWEN_IMAGE = Architecture(
    ("QwenImageTransformer2DModel", {}), ("AutoencoderKLQwenImage", _CAUSAL_VAE), {"Qwen2.5-VL-7B": QWEN_VL}
)
_WAN21_I2V = Architecture(
    ("WanTransformer3DModel", {**_WAN_14B, **_WAN_PICTURE, "image_dim": 1280, "added_kv_proj_dim": 5120}),
    ("AutoencoderKLWan", _CAUSAL_VAE),
    {"UMT5-XXL": UMT5_XXL},
    image_encoders={"CLIP-H": CLIP_H_VISION},
    inputs={"image_tokens": CLIP_H_TOKENS},
)
KNOWN = {
    "stabilityai/stable-diffusion-3.5-medium": Architecture(
        (
            "SD3Transformer2DModel",
            {
                "num_layers": 24, "num_attention_heads": 24, "attention_head_dim": 64, "caption_projection_dim": 1536,
                "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "pos_embed_max_size": 384,
                "sample_size": 128, "qk_norm": "rms_norm", "dual_attention_layers": list(range(13)),
            },
        ),
        ("AutoencoderKL", _VAE),
        {"CLIP-L": CLIP_L_PROJECTED, "CLIP-G": CLIP_G, "T5-XXL": T5_XXL},
    ),
    "black-forest-labs/FLUX.1-dev": _FLUX,
    "black-forest-labs/FLUX.1-Kontext-dev": replace(_FLUX, inputs=_EDITS["FluxKontextPipeline"]),
    "Qwen/Qwen-Image": _QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit": replace(_QWEN_IMAGE, inputs=_EDITS["QwenImageEditPipeline"]),
    "Qwen/Qwen-Image-Edit-2509": replace(_QWEN_IMAGE, inputs=_EDITS["QwenImageEditPlusPipeline"]),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": Architecture(
        ("WanTransformer3DModel", {**_WAN, "num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}),
        ("AutoencoderKLWan", _CAUSAL_VAE),
        {"UMT5-XXL": UMT5_XXL},
    ),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": Architecture(
        ("WanTransformer3DModel", _WAN_14B),
        ("AutoencoderKLWan", _CAUSAL_VAE),
        {"UMT5-XXL": UMT5_XXL},
    ),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": _WAN21_I2V,
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": _WAN21_I2V,
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": Architecture(
        ("WanTransformer3DModel", {**_WAN_14B, **_WAN_PICTURE}),
        ("AutoencoderKLWan", _CAUSAL_VAE),
        {"UMT5-XXL": UMT5_XXL},
        experts=2,
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


@dataclass(frozen=True)
class Family:
    """How pipelines call a denoiser of one class.

    Attributes:
        inputs: (configuration, latent shape, text tokens, rows) -> the arguments, on the default device.
        text_tokens: tokens of a prompt in the pipeline's default call; None if the pipeline does not pad prompts.
        fixed: how many of these tokens `max_sequence_length` does not change.
        guidance: name of the argument for guidance; above 1, every state is evaluated twice.
        negative: whether guidance needs a `negative_prompt` too.
        together: whether both evaluations are one call with twice the rows.
        float32: whether the pipeline keeps its states in float32, whatever the dtype of its weights.
        alike: whether blocks with equal weights cost the same. The blocks of a U-Net may have different resolutions.
        noise: whether the model predicts noise; the velocity that its prediction implies is computed in float32.
    """

    inputs: Callable[[Mapping[str, Any], tuple[int, ...], int, int], dict[str, Any]]
    text_tokens: int | None
    fixed: int
    guidance: str
    negative: bool
    together: bool
    float32: bool
    alike: bool = True
    noise: bool = False

    def branches(self, call: Mapping[str, Any]) -> int:
        """Evaluations of the denoiser for one state."""
        given = call.get(self.guidance)
        guided = (DEFAULT_GUIDANCE[self.guidance] if given is None else float(given)) > 1.0
        return 2 if guided and not (self.negative and call.get("negative_prompt") is None) else 1

    def tokens(self, call: Mapping[str, Any]) -> int:
        """Text tokens of a prompt."""
        if self.text_tokens is None:
            return PROMPT_TOKENS
        return int(call.get("max_sequence_length", self.text_tokens - self.fixed)) + self.fixed


PROMPT_TOKENS = 64
"""The number of tokens that is assumed for a prompt if the pipeline does not pad it."""
DEFAULT_GUIDANCE = {"guidance_scale": 5.0, "true_cfg_scale": 1.0}


def _sd3(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.empty(rows, *latent),
        "encoder_hidden_states": torch.empty(rows, tokens, config["joint_attention_dim"]),
        "pooled_projections": torch.empty(rows, config["pooled_projection_dim"]),
        "timestep": torch.empty(rows),
    }


def _flux(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    packed = latent[-2] * latent[-1] // 4 + config.get("picture_tokens", 0)
    return {
        "hidden_states": torch.empty(rows, packed, config["in_channels"]),
        "encoder_hidden_states": torch.empty(rows, tokens, config["joint_attention_dim"]),
        "pooled_projections": torch.empty(rows, config["pooled_projection_dim"]),
        "timestep": torch.empty(rows),
        "guidance": torch.empty(rows) if config["guidance_embeds"] else None,
        "img_ids": torch.empty(packed, 3),
        "txt_ids": torch.empty(tokens, 3),
    }


def _qwen(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    height, width = latent[-2] // 2, latent[-1] // 2
    picture = config.get("picture_tokens", 0)
    side = math.isqrt(picture)
    return {
        "hidden_states": torch.empty(rows, height * width + picture, config["in_channels"]),
        "encoder_hidden_states": torch.empty(rows, tokens, config["joint_attention_dim"]),
        "timestep": torch.empty(rows),
        "img_shapes": [[(1, height, width), *([(1, side, side)] if picture else [])]] * rows,
    }


def _wan(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    frames, height, width = latent[1:]
    _, *patch = config["patch_size"]
    each = (frames * (height // patch[0]) * (width // patch[1]),) if config.get("expand_timesteps") else ()
    inputs = {
        # Image-to-video appends a mask and the latents of the picture to the state, as further channels.
        "hidden_states": torch.empty(rows, config["in_channels"], *latent[1:]),
        "encoder_hidden_states": torch.empty(rows, tokens, config["text_dim"]),
        "timestep": torch.empty(rows, *each),
    }
    if config.get("image_dim") is not None:
        # A transformer with positions for the tokens of pictures gets the first picture and the last.
        pictures = rows if config.get("pos_embed_seq_len") is None else 2 * rows
        shape = (pictures, config.get("image_tokens", CLIP_H_TOKENS), config["image_dim"])
        inputs["encoder_hidden_states_image"] = torch.empty(shape)
    return inputs


def _unet(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "sample": torch.empty(rows, config["in_channels"], *latent[1:]),
        "timestep": torch.empty(rows),
        "encoder_hidden_states": torch.empty(rows, tokens, config["cross_attention_dim"]),
    }
    kind = config.get("addition_embed_type")
    if kind == "text_time":
        times = SDXL_TIMES * config["addition_time_embed_dim"]
        pooled = config["projection_class_embeddings_input_dim"] - times
        inputs["added_cond_kwargs"] = {
            "text_embeds": torch.empty(rows, pooled),
            "time_ids": torch.empty(rows, SDXL_TIMES),
        }
    elif kind is not None or config.get("class_embed_type") is not None or config.get("encoder_hid_dim") is not None:
        raise ValueError(
            "no estimate for a UNet2DConditionModel whose inputs differ from the inputs of Stable Diffusion and SDXL "
            f"(addition_embed_type {kind!r}, class_embed_type {config.get('class_embed_type')!r}, encoder_hid_dim "
            f"{config.get('encoder_hid_dim')!r})"
        )
    return inputs


SDXL_TIMES = 6
"""How many numbers SDXL gets about the sizes and corners of the picture."""

WAN_SIZE = 480, 832
"""Height and width of a video if the call gives none."""

FAMILIES = {
    "SD3Transformer2DModel": Family(_sd3, 333, 77, "guidance_scale", False, True, False),
    "FluxTransformer2DModel": Family(_flux, 512, 0, "true_cfg_scale", True, False, False),
    "QwenImageTransformer2DModel": Family(_qwen, None, 0, "true_cfg_scale", True, False, False),
    "WanTransformer3DModel": Family(_wan, 512, 0, "guidance_scale", False, False, True),
    "UNet2DConditionModel": Family(_unet, 77, 77, "guidance_scale", False, True, False, alike=False, noise=True),
}


def architecture_of(path: str, pipeline: str | None = None) -> Architecture:
    """The shapes of a pipeline folder, or of a known model id; no weight is read.

    Args:
        path: the folder or the id.
        pipeline: the class that loads it, if it is not the class that it names.

    Raises:
        ValueError: `path` is neither of them, or the class of the pipeline's denoiser is not in `FAMILIES`.
    """
    folder = Path(path)
    if not (folder / "model_index.json").is_file():
        if path not in KNOWN:
            raise ValueError(
                f"the shapes of {path!r} are not known; give the folder of the pipeline (its weights are not read), or "
                f"one of {', '.join(KNOWN)}"
            )
        known = KNOWN[path]
        return known if pipeline is None else replace(known, inputs=_EDITS.get(pipeline, {}))
    index = _read(folder / "model_index.json")
    part = {name: entry[1] for name, entry in index.items() if is_part(entry)}
    key = "unet" if "unet" in part else "transformer"
    if part.get(key) not in FAMILIES or "vae" not in part:
        raise ValueError(
            f"{path}: there is no estimate for a pipeline with the denoiser {part.get(key, 'none')}; there are "
            f"estimates for {', '.join(FAMILIES)}"
        )
    vision = [name for name in part if name.startswith("image_encoder") and (folder / name).is_dir()]
    encoders = [name for name in part if name.startswith("text_encoder") and (folder / name).is_dir()]
    return Architecture(
        (part[key], _read(folder / key / "config.json")),
        (part["vae"], _read(folder / "vae" / "config.json")),
        {name: _stored_numbers(folder / name) for name in encoders},
        experts=2 if "transformer_2" in part else 1,
        image_encoders={name: _stored_numbers(folder / name) for name in vision},
        inputs={
            **_EDITS.get(pipeline or str(read_json_object(folder / "model_index.json").get("_class_name")), {}),
            "expand_timesteps": bool(index.get("expand_timesteps")),
            **({"image_tokens": _image_tokens(folder / vision[0] / "config.json")} if vision else {}),
        },
    )


def _image_tokens(path: Path) -> int:
    """Tokens of a picture from the configuration of a vision transformer: its patches, and one for the whole."""
    config = _read(path)
    try:
        return (int(config["image_size"]) // int(config["patch_size"])) ** 2 + 1
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{path}: there is no estimate, because it has no whole numbers image_size and patch_size; write the "
            "numbers of the image encoder there"
        ) from None


def built(name: str, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """A network of diffusers on `meta`, in the number format that `cast_base` would give it."""
    import diffusers

    with torch.device("meta"):
        module: nn.Module = getattr(diffusers, name).from_config(dict(config))
    module.to("meta").requires_grad_(False)
    pipe: Any = SimpleNamespace(components={"transformer": module})
    cast_base(pipe, dtype)
    return module


def latent_shape(architecture: Architecture, call: Mapping[str, Any]) -> tuple[int, ...]:
    """Shape of the latent that the VAE decodes: [C, h, w], or [C, f, h, w] for a model of videos.

    A denoiser may take more channels: image-to-video appends a picture to the state.
    """
    (name, config), (_, settings) = architecture.denoiser, architecture.vae
    blocks = settings.get("block_out_channels") or settings.get("dim_mult") or _CAUSAL_VAE["dim_mult"]
    scale = int(settings.get("scale_factor_spatial") or 2 ** (len(blocks) - 1))
    square = int(config.get("sample_size", 1024 // scale)) * scale
    tall, wide = WAN_SIZE if "3D" in name else (square, square)
    height, width = int(call.get("height", tall)) // scale, int(call.get("width", wide)) // scale
    channels = int(settings.get("latent_channels") or settings.get("z_dim") or _CAUSAL_VAE["z_dim"])
    if "QwenImage" in name:
        return channels, 1, height, width
    if "3D" in name:
        return channels, (int(call.get("num_frames", 81)) - 1) // 4 + 1, height, width
    return channels, height, width


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return {key: value for key, value in found.items() if not key.startswith("_")}


def _stored_numbers(folder: Path) -> int:
    """How many numbers the safetensors files of a folder hold; only the headers are read."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for entry in header.values():
            shape = entry.get("shape")
            if shape is not None:
                count = 1
                for size in shape:
                    count *= size
                total += count
    return total
