"""What the training scripts of flow_grpo have without a key in the configuration: LoRA, arguments of the call, noise.

A configuration does not say which script it is for. The model says most of it. A configuration of Stable Diffusion 3 is
for the script with a window if it sets the window itself, since every configuration inherits one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .foreign_settings import ForeignSettings

SQUARE = (("resolution", "height"), ("resolution", "width"))
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
MLP = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")
ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip


@dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
        name: name of its file.
        model: what it trains, in words.
        rank, alpha: of the LoRA.
        targets: layers of the LoRA; None for the attention projections, the default of recipes.
        call: pairs of their key and an argument of the pipeline's call; None if the model is no pipeline of diffusers.
        always: arguments of the call that are fixed.
        kernel: the noise of its steps; empty if the configuration chooses it.
        fast: whether it reads the window of the configuration.
        drops_equal: whether samples without an advantage leave the mean of the loss.
        pictures: whether each prompt has a picture.
    """

    name: str
    model: str
    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    call: tuple[tuple[str, str], ...] | None = (*SQUARE, ("sample.guidance_scale", "guidance_scale"))
    always: Mapping[str, object] = field(default_factory=dict)
    kernel: str = ""
    fast: bool = False
    drops_equal: bool = False
    pictures: bool = False


SD3 = Script("train_sd3.py", "Stable Diffusion 3", 32, 64.0, always={"max_sequence_length": 128}, drops_equal=True)
FLUX = Script("train_flux.py", "FLUX", 64, 128.0, (*ATTENTION, *FEED_FORWARD), always={"max_sequence_length": 128})
QWEN = Script(
    "train_qwenimage.py", "Qwen-Image", 64, 128.0, (*ATTENTION, *MLP),
    (*SQUARE, ("sample.guidance_scale", "true_cfg_scale")), {"negative_prompt": " "}, fast=True,
)  # fmt: skip
WAN = Script(
    "train_wan2_1.py", "Wan 2.1", 32, 64.0, None,
    (("height", "height"), ("width", "width"), ("frames", "num_frames"), ("sample.guidance_scale", "guidance_scale")),
    kernel="wan_sde", drops_equal=True,
)  # fmt: skip
SCRIPTS: dict[str, Script] = {
    "bagel": Script("train_bagel.py", "BAGEL", 64, 128.0, call=None, fast=True),
    "kontext": replace(FLUX, name="train_flux_kontext.py", model="FLUX Kontext", pictures=True),
    "flux": FLUX,
    "qwen-image-edit": replace(QWEN, name="train_qwenimage_edit.py", model="Qwen-Image-Edit", pictures=True),
    "qwen": QWEN,
    "wan": WAN,
    "": SD3,
}
"""Word in the name of the model, in small letters -> script; the first that fits."""
STABLE = ("stable-diffusion", "sd3")
WINDOW = ("sample.sde_window_size", "sample.sde_window_range", "sample.train_num_steps")


def model_word(path: str, words: Sequence[str], own: Sequence[str] = ()) -> str:
    """Which of some words the path of a model has; an empty text if it has none.

    The last part of a path names the model, and the folders before it may be anything, such as a user's name. So they
    count only if the last part has none of the words, and then only for a word that stands alone.

    Args:
        path: a folder or a hub id.
        words: in small letters; the first that fits is taken.
        own: words of models that have none of `words`.
    """
    *folders, last = path.lower().replace("\\", "/").rstrip("/").split("/")
    for word in words:
        if re.search(rf"(?<![a-z]){re.escape(word)}", last):
            return word
    if any(word in last for word in own):
        return ""
    alone = (
        w for folder in reversed(folders) for w in words if re.search(rf"(?<![a-z]){re.escape(w)}(?![a-z])", folder)
    )
    return next(alone, "")


def script_of(settings: ForeignSettings, own: set[str]) -> Script:
    """The script that a configuration is for.

    Args:
        settings: the configuration.
        own: keys that the configuration sets itself, and does not inherit from base.py.
    """
    path = settings.text("pretrained.model") or ""
    found = SCRIPTS[model_word(path, [word for word in SCRIPTS if word], STABLE)]
    if found.fast or found.kernel or not own & set(WINDOW):
        return found
    return replace(found, name=found.name.replace(".py", "_fast.py"), fast=True)
