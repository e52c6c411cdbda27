"""How pipelines call their denoisers: the inputs of each class of diffusers, and the evaluations of a state."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from .known_pipelines import CLIP_H_TOKENS
from .sound_inputs import ACE_STEP_TEXT, STABLE_AUDIO_TEXT, Seconds, ace_step, longcat, stable_audio


class Scale(NamedTuple):
    """An argument of a pipeline's call for the strength of a kind of guidance.

    Attributes:
        name: of the argument.
        default: its value if the call does not give it.
        above: the guidance is in force above this value.
    """

    name: str
    default: float
    above: float = 1.0

    def in_force(self, call: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments has this guidance."""
        given = call.get(self.name)
        return (self.default if given is None else float(given)) > self.above


class GuidedCalls(NamedTuple):
    """How a pipeline evaluates a state.

    Attributes:
        number: of rows of the denoiser for one state.
        rows: how many of these rows the largest call of the denoiser has.
        texts: how many prompts are kept encoded for one prompt.
        wide: whether the prediction needs float32, whatever the dtype of the weights.
    """

    number: int
    rows: int
    texts: int
    wide: bool


@dataclass(frozen=True)
class Family:
    """How pipelines call a denoiser of one class.

    Attributes:
        inputs: (configuration, latent shape, text tokens, rows) -> the arguments, on the default device.
        text_tokens: tokens of a prompt in the pipeline's default call; None if the pipeline does not pad prompts.
        fixed: how many of these tokens `max_sequence_length` does not change.
        guidance: if one of these is in force, every state is evaluated twice.
        negative: whether guidance needs a `negative_prompt` too.
        together: whether both evaluations are one call with twice the rows.
        float32: whether the pipeline keeps its states in float32, whatever the dtype of its weights.
        apart: whether the negative prompt is encoded in a call of its own, so its embeddings are kept once for the run.
        alike: whether blocks with equal weights cost the same. The blocks of a U-Net may have different resolutions.
        wide: when the pipeline's prediction needs float32, whatever the dtype of the weights: a pipeline combines the
            predictions of guidance in float32, or computes its velocity from predicted noise.
        further: each group takes one more evaluation, in a call of its own, if one of its scales is in force.
        sound: whether the state has a sound beside the video.
        appended: whether the tokens of pictures in the call's `image` are beside the state.
        decoded_alone: whether videos are decoded one by one, see `weights/pipeline_classes.py`.
        frames: frames of the pipeline's default call. It is 1 for images whose latents have an axis of frames, and None
            for latents without this axis.
        size: height and width of the pipeline's default call, or a function of the denoiser's configuration and of the
            autoencoder's compression in space; None for a square of the denoiser's `sample_size`.
        seconds: how the call says the length of a sound, for pipelines of sounds.
    """

    inputs: Callable[[Mapping[str, Any], tuple[int, ...], int, int], dict[str, Any]]
    text_tokens: int | None
    fixed: int
    guidance: tuple[Scale, ...]
    negative: bool
    together: bool
    float32: bool
    apart: bool = False
    alike: bool = True
    wide: Literal["never", "guided", "always"] = "never"
    further: tuple[tuple[Scale, ...], ...] = ()
    sound: bool = False
    appended: bool = False
    decoded_alone: bool = False
    frames: int | None = None
    size: tuple[int, int] | Callable[[Mapping[str, Any], int], tuple[int, int]] | None = None
    seconds: Seconds | None = None

    def evaluations(self, call: Mapping[str, Any], one: bool = False, guider: int | None = None) -> GuidedCalls:
        """How the pipeline evaluates a state.

        Args:
            call: arguments of the pipeline's call.
            one: whether the pipeline never makes a second evaluation, because its model was distilled.
            guider: evaluations that the pipeline's guider asks for, each in a call of its own; None without a guider.
        """
        if guider is not None:
            return GuidedCalls(guider, 1, 1 if self.apart else guider, self.wide == "always")
        possible = not one and not (self.negative and call.get("negative_prompt") is None)
        guided = possible and any(scale.in_force(call) for scale in self.guidance)
        more = sum(any(scale.in_force(call) for scale in group) for group in self.further)
        return GuidedCalls(
            number=1 + guided + more,
            rows=2 if guided and self.together else 1,
            texts=2 if guided and not self.apart else 1,
            wide=self.wide == "always" or (self.wide == "guided" and guided),
        )

    def beside(self, call: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, int]:
        """What a call adds to the denoiser's configuration: `sound_tokens`, for a state with a sound.

        Args:
            call: arguments of the pipeline's call.
            inputs: of the pipeline's `Architecture`.
        """
        if not self.sound:
            return {}
        seconds = int(call.get("num_frames", self.frames)) / float(call.get("frame_rate", FRAME_RATE))
        return {"sound_tokens": round(seconds * float(inputs["sound_rate"]))}

    def default_size(self, config: Mapping[str, Any], scale: int) -> tuple[int, int]:
        """Height and width of the pipeline's default call.

        Args:
            config: of the denoiser.
            scale: how many times smaller a latent is than its picture, on a side.
        """
        if self.size is None:
            square = int(config.get("sample_size", 1024 // scale)) * scale
            return square, square
        return self.size(config, scale) if callable(self.size) else self.size

    def tokens(self, call: Mapping[str, Any]) -> int:
        """Text tokens of a prompt."""
        if self.text_tokens is None:
            return PROMPT_TOKENS
        return int(call.get("max_sequence_length", self.text_tokens - self.fixed)) + self.fixed


PROMPT_TOKENS = 64
"""The number of tokens that is assumed for a prompt if the pipeline does not pad it."""
FRAME_RATE = 24.0
"""Frames a second of a video with sound, if the call does not give another rate."""


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


def _flux2(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    packed = (latent[-2] // 2) * (latent[-1] // 2) + config.get("picture_tokens", 0)
    return {
        "hidden_states": torch.empty(rows, packed, config["in_channels"]),
        "encoder_hidden_states": torch.empty(rows, tokens, config["joint_attention_dim"]),
        "timestep": torch.empty(rows),
        "guidance": torch.empty(rows) if config["guidance_embeds"] else None,
        "img_ids": torch.empty(rows, packed, 4),
        "txt_ids": torch.empty(rows, tokens, 4),
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


def _z_image(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    if config.get("siglip_feat_dim") is not None:
        raise ValueError(
            "no estimate for a ZImageTransformer2DModel that also reads pictures (siglip_feat_dim "
            f"{config['siglip_feat_dim']})"
        )
    # The model takes lists, because prompts and pictures may differ in length.
    return {
        "x": [torch.empty(latent[0], 1, *latent[1:]) for _ in range(rows)],
        "t": torch.empty(rows),
        "cap_feats": [torch.empty(tokens, config["cap_feat_dim"]) for _ in range(rows)],
    }


def _hunyuan_video(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    if config.get("image_condition_type") is not None or config["in_channels"] != latent[0]:
        raise ValueError(
            "no estimate for a HunyuanVideoTransformer3DModel that takes a picture (image_condition_type "
            f"{config.get('image_condition_type')!r}, {config['in_channels']} channels)"
        )
    return {
        "hidden_states": torch.empty(rows, *latent),
        "timestep": torch.empty(rows),
        "encoder_hidden_states": torch.empty(rows, tokens, config["text_embed_dim"]),
        "encoder_attention_mask": torch.empty(rows, tokens),
        "pooled_projections": torch.empty(rows, config["pooled_projection_dim"]),
        "guidance": torch.empty(rows),
    }


def _hunyuan_video15(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    return {
        # The latents of a picture and a mask are appended to the state, as zeros if there is no picture.
        "hidden_states": torch.empty(rows, config["in_channels"], *latent[1:]),
        "image_embeds": torch.empty(rows, config.get("image_tokens", HUNYUAN15_PICTURE), config["image_embed_dim"]),
        "timestep": torch.empty(rows),
        "encoder_hidden_states": torch.empty(rows, tokens, config["text_embed_dim"]),
        "encoder_attention_mask": torch.empty(rows, tokens),
        "encoder_hidden_states_2": torch.empty(rows, HUNYUAN15_GLYPHS, config["text_embed_2_dim"]),
        "encoder_attention_mask_2": torch.empty(rows, HUNYUAN15_GLYPHS),
    }


def _hunyuan_video15_size(config: Mapping[str, Any], scale: int) -> tuple[int, int]:
    """The class's own choice for a video of 16:9. The classes of image-to-video take the proportions of the picture."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=scale)
    height, width = processor.calculate_default_height_width(9, 16, int(config.get("target_size", 640)))
    return height, width


def _ltx2(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    video, sound = math.prod(latent[1:]), config["sound_tokens"]
    widths = [config["caption_channels"]] * 2
    if not config.get("use_prompt_embeddings", True):
        widths = [config["cross_attention_dim"], config["audio_cross_attention_dim"]]
    inputs = {
        "hidden_states": torch.empty(rows, video, config["in_channels"]),
        "audio_hidden_states": torch.empty(rows, sound, config["audio_in_channels"]),
        "encoder_hidden_states": torch.empty(rows, tokens, widths[0]),
        "audio_encoder_hidden_states": torch.empty(rows, tokens, widths[1]),
        "timestep": torch.empty(rows),
        "sigma": torch.empty(rows),
        "encoder_attention_mask": torch.empty(rows, tokens),
        "audio_encoder_attention_mask": torch.empty(rows, tokens),
        "num_frames": latent[1],
        "height": latent[2],
        "width": latent[3],
        "audio_num_frames": sound,
        "video_coords": torch.empty(rows, 3, video, 2),
        "audio_coords": torch.empty(rows, 1, sound, 2),
        "use_cross_timestep": True,
    }
    # The class of an older diffusers takes fewer.
    return {name: value for name, value in inputs.items() if name in _taken("LTX2VideoTransformer3DModel")}


def _taken(name: str) -> Collection[str]:
    """The arguments of the forward pass of a class of diffusers."""
    import diffusers

    return inspect.signature(getattr(diffusers, name).forward).parameters


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


HUNYUAN15_TEXT, HUNYUAN15_GLYPHS, HUNYUAN15_PICTURE = 1000, 256, 729
"""Tokens of a prompt, of the text to be written in the video, and of a picture in HunyuanVideo 1.5, always padded."""
SDXL_TIMES = 6
"""How many numbers SDXL gets about the sizes and corners of the picture."""

_GUIDANCE, _TRUE_GUIDANCE = (Scale("guidance_scale", 5.0),), (Scale("true_cfg_scale", 1.0),)

FAMILIES = {
    "SD3Transformer2DModel": Family(_sd3, 333, 77, _GUIDANCE, False, True, False),
    "FluxTransformer2DModel": Family(_flux, 512, 0, _TRUE_GUIDANCE, True, False, False, apart=True),
    "Flux2Transformer2DModel": Family(_flux2, 512, 0, _GUIDANCE, False, False, False, apart=True, appended=True),
    "QwenImageTransformer2DModel": Family(_qwen, None, 0, _TRUE_GUIDANCE, True, False, False, apart=True, frames=1),
    # Z-Image computes its guidance as p + s · (p - n), so any scale above 0 is in force.
    "ZImageTransformer2DModel": Family(
        _z_image, None, 0, (Scale("guidance_scale", 5.0, above=0.0),), False, True, True, wide="guided"
    ),
    "WanTransformer3DModel": Family(_wan, 512, 0, _GUIDANCE, False, False, True, frames=81, size=(480, 832)),
    "HunyuanVideoTransformer3DModel": Family(
        _hunyuan_video, 256, 0, _TRUE_GUIDANCE, True, False, True, apart=True, frames=129, size=(720, 1280)
    ),
    # Its guidance is in the guider.
    "HunyuanVideo15Transformer3DModel": Family(
        _hunyuan_video15,
        HUNYUAN15_TEXT,
        HUNYUAN15_TEXT,
        (),
        False,
        False,
        False,
        apart=True,
        decoded_alone=True,
        frames=121,
        size=_hunyuan_video15_size,
    ),
    # Video and sound have scales of their own. Either of two scales brings its evaluation for both.
    "LTX2VideoTransformer3DModel": Family(
        _ltx2,
        1024,
        0,
        (Scale("guidance_scale", 3.0), Scale("audio_guidance_scale", 7.0)),
        False,
        True,
        True,
        wide="always",
        further=(
            (Scale("stg_scale", 1.0, above=0.0), Scale("audio_stg_scale", 1.0, above=0.0)),
            (Scale("modality_scale", 3.0), Scale("audio_modality_scale", 3.0)),
        ),
        sound=True,
        frames=121,
        size=(512, 768),
    ),
    "StableAudio3DiTModel": Family(
        stable_audio,
        STABLE_AUDIO_TEXT,
        STABLE_AUDIO_TEXT,
        (Scale("guidance_scale", 1.0),),
        False,
        True,
        False,
        apart=True,
        seconds=Seconds("duration", 10.0),
    ),
    "AceStepTransformer1DModel": Family(
        ace_step,
        ACE_STEP_TEXT,
        ACE_STEP_TEXT,
        (Scale("guidance_scale", 7.0),),
        False,
        True,
        False,
        apart=True,
        seconds=Seconds("audio_duration", 60.0),
    ),
    "LongCatAudioDiTTransformer": Family(
        longcat,
        None,
        0,
        (Scale("guidance_scale", 4.0),),
        False,
        False,
        False,
        apart=True,
        seconds=Seconds("audio_duration_s", 30.0, part=False, longest=30.0),
    ),
    "UNet2DConditionModel": Family(_unet, 77, 77, _GUIDANCE, False, True, False, alike=False, wide="always"),
}
"""Classes of denoisers that have an estimate."""
