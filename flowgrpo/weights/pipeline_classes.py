"""Settings for the few pipeline classes that do not work unmodified; most classes need no entry here.

No code of diffusers is copied. An entry says how the pipelines of its class are called and prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

Together = Literal["all", "prompt", "one"]


@dataclass(frozen=True)
class Adapter:
    """How one pipeline class is called.

    Attributes:
        why: what does not work without this entry.
        rows: arguments that take one value for each prompt, and do not take a single value for all prompts.
        call: arguments that a call has if it does not give them.
        together: which rows one call can hold: all rows, the rows of one prompt, or one row. The other rows need
            further calls.
        text: the class takes its prompt as a text, not as a list with one text.
        prepare: prepares the pipeline, once.
        recompute: why gradient checkpointing must stay off, "" if it may be on.
        states: how many states the class steps at each noise level, such as a video and its sound.
        kept: text encoders that a call needs even after all prompts are encoded.
        dropped: how many of the frames that a call asks for a pipeline leaves out; None if it leaves out none.
    """

    why: str
    rows: tuple[str, ...] = ()
    together: Together = "all"
    text: bool = False
    prepare: Callable[[Any], None] | None = None
    recompute: str = ""
    states: int = 1
    kept: tuple[str, ...] = ()
    dropped: Callable[[Any], int] | None = None
    call: Mapping[str, Any] = field(default_factory=dict)


def _decode_one_by_one(pipe: Any) -> None:
    pipe.vae.enable_slicing()


def _vae_in_float32(pipe: Any) -> None:
    pipe.vae.float()


def _shown_frames(pipe: Any) -> int:
    """The frames of the given picture, which the older HunyuanVideo cuts off the video."""
    return 4 if pipe.transformer.config.image_condition_type == "latent_concat" else 0


def _checkpointing_off(pipe: Any) -> None:
    """Give the ControlNet a field that it reads with gradients, and that its class does not have."""
    if not hasattr(pipe.controlnet, "gradient_checkpointing"):
        pipe.controlnet.gradient_checkpointing = False


def _experts_with_gradient(pipe: Any) -> None:
    """Replace the mixture of experts that the class uses at inference, because that mixture stops the gradient."""
    for module in pipe.transformer.modules():
        if type(module).__name__ == "MOEFeedForwardSwiGLU":
            module.__dict__["moe_infer"] = partial(_mixture, module)


def _mixture(module: Any, x: Tensor, expert_of: Tensor, weight: Tensor) -> Tensor:
    """[tokens, width] for x [tokens, width]; each token has `num_activated_experts` rows of expert and weight."""
    mixed = torch.zeros_like(x)
    for number, expert in enumerate(module.experts):
        rows = (expert_of == number).nonzero().squeeze(1)
        tokens = rows // module.num_activated_experts
        mixed = mixed.index_add(0, tokens, (expert(x[tokens]) * weight[rows]).to(x.dtype))
    return mixed


_A_PICTURE_EACH = "takes one picture for each prompt, so a single picture is repeated"
_PADDED = "attends to the padding of shorter prompts, so each call holds one prompt only"
_NO_MASK = "the library's gradient checkpointing of Chroma leaves the attention mask out, which changes the prediction"
_TWO_ROWS = "under guidance the timestep is repeated for two rows only, so each call holds one prompt"
_ONE_TEXT = "the library takes one prompt at a time, as a text"
_WITH_SOUND = "video and sound are one state, and rewards see the video only"
_NO_FIELD = "with gradients, its ControlNet reads a field that the library does not set, so it is set"
_NONE = Adapter("")

ADAPTERS: dict[str, Adapter] = {
    "StableDiffusion3Img2ImgPipeline": Adapter(_A_PICTURE_EACH, rows=("image",)),
    "StableDiffusion3PAGImg2ImgPipeline": Adapter(_A_PICTURE_EACH, rows=("image",)),
    "ZImageControlNetPipeline": Adapter(_NO_FIELD, prepare=_checkpointing_off),
    "ZImageControlNetInpaintPipeline": Adapter(
        f"{_NO_FIELD}; and the class takes one mask for each prompt, so a single mask is repeated",
        rows=("mask_image",),
        prepare=_checkpointing_off,
    ),
    "FluxControlInpaintPipeline": Adapter(
        "a single picture gets other noise in the first row than in the others, so it is repeated",
        rows=("image", "mask_image", "control_image"),
    ),
    "QwenImageEditPipeline": Adapter(_A_PICTURE_EACH, rows=("image",)),
    "QwenImageEditInpaintPipeline": Adapter(_A_PICTURE_EACH, rows=("image",)),
    "Cosmos2VideoToWorldPipeline": Adapter(_A_PICTURE_EACH, rows=("image",)),
    "LTXImageToVideoPipeline": Adapter(_A_PICTURE_EACH, rows=("image",)),
    "HunyuanSkyreelsImageToVideoPipeline": Adapter(_A_PICTURE_EACH, rows=("image",)),
    "HunyuanVideoImageToVideoPipeline": Adapter(
        "the library takes one picture in a call", together="one", dropped=_shown_frames
    ),
    "LucyEditPipeline": Adapter(
        "the library takes one video in a call, and encodes it in float32, so its VAE is in float32",
        together="one",
        prepare=_vae_in_float32,
    ),
    "MotifVideoImage2VideoPipeline": Adapter(
        "the library takes one picture in a call; its text encoder also reads the picture, so it is never released",
        together="one",
        kept=("text_encoder",),
    ),
    "QwenImageEditPlusPipeline": Adapter("the library takes one prompt at a time", together="one"),
    "LongCatImageEditPipeline": Adapter("the library takes one prompt at a time", together="one"),
    "WanVACEPipeline": Adapter(_ONE_TEXT, together="one", text=True),
    "LTX2Pipeline": Adapter(_WITH_SOUND, states=2),
    "LTX2ImageToVideoPipeline": Adapter(
        f"{_WITH_SOUND}; the library takes one picture in a call", together="one", states=2
    ),
    "LTX2ConditionPipeline": Adapter(_WITH_SOUND, states=2),
    "LTX2InContextPipeline": Adapter(_WITH_SOUND, states=2),
    "Cosmos3OmniPipeline": Adapter("the library takes one prompt at a time", together="one"),
    "DreamLitePipeline": Adapter(_ONE_TEXT, together="one", text=True),
    "DreamLiteMobilePipeline": Adapter(_ONE_TEXT, together="one", text=True),
    "PRXPipeline": Adapter(_TWO_ROWS, together="one"),
    "PRXPixelPipeline": Adapter(_TWO_ROWS, together="one"),
    "HunyuanVideo15Pipeline": Adapter(
        "the mask of its autoencoder fits one video only, so videos are decoded one by one", prepare=_decode_one_by_one
    ),
    "HunyuanVideo15ImageToVideoPipeline": Adapter(
        "the mask of its autoencoder fits one video only, so videos are decoded one by one", prepare=_decode_one_by_one
    ),
    "OmniGenPipeline": Adapter(_PADDED, together="prompt"),
    "QwenImage21Pipeline": Adapter(_PADDED, together="prompt"),
    "Kandinsky5T2IPipeline": Adapter(_PADDED, together="prompt"),
    "Kandinsky5T2VPipeline": Adapter(_PADDED, together="prompt"),
    "Kandinsky5I2VPipeline": Adapter(_PADDED, together="prompt"),
    "HunyuanImageRefinerPipeline": Adapter(
        "a single picture gets other noise in the first row than in the others, so it is repeated", rows=("image",)
    ),
    "Kandinsky5I2IPipeline": Adapter(
        f"{_PADDED}; and the class takes one picture for each prompt, so a single picture is repeated",
        rows=("image",),
        together="prompt",
    ),
    "HiDreamImagePipeline": Adapter(
        "at inference the class mixes its experts without gradient, so its mixture is replaced by one with gradient",
        prepare=_experts_with_gradient,
    ),
    "AceStepPipeline": Adapter(
        f"{_PADDED}; and the class takes one lyric for each prompt, so a single lyric is repeated",
        rows=("lyrics",),
        together="prompt",
        call={"lyrics": ""},
    ),
    "ChromaPipeline": Adapter("", recompute=_NO_MASK),
    "ChromaImg2ImgPipeline": Adapter("", recompute=_NO_MASK),
}


def adapter_of(pipe: Any) -> Adapter:
    """The entry of a pipeline's class, or one that changes nothing."""
    return ADAPTERS.get(type(pipe).__name__, _NONE)
