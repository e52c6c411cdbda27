"""CLIP score: cosine similarity of an image and its prompt.

Hessel et al., "CLIPScore: A Reference-free Evaluation Metric for Image Captioning" (2021), without the rescaling in
equation 1 of the paper. Only scores of images for the same prompt can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..backbones.open_clip_model import open_clip_towers
from ..backbones.towers import TowerReward, transformers_towers

BACKENDS = ("open_clip", "transformers")


class ClipScore(TowerReward):
    """Text match: cosine between the CLIP embeddings of the image and of its prompt (open_clip or transformers).

    Args:
        model: for open_clip an architecture ("ViT-L-14-quickgelu"), the path of a `.json` architecture file, a
            folder in open_clip's format (also written "local-dir:FOLDER"), or "hf-hub:ORG/NAME"; for transformers
            a folder or model id. The weights of the models of OpenAI and DFN need the open_clip architectures whose
            names end in "-quickgelu".
        pretrained: open_clip only: the path of a checkpoint, "hf-hub:ORG/NAME/FILE", or one of open_clip's tags for
            the architecture ("openai"), which open_clip downloads. Leave it out for a folder or hub model, which has
            its own weights.
        backend: "open_clip" or "transformers"; by default "transformers" for a folder that has a `config.json` of
            transformers, and "open_clip" otherwise.
        device: where to score.
        dtype: data type of the weights. Only float32 gives fine cosines; the others are coarse.
        batch_size: largest number of images in one call.
        frames: how many frames of a video are scored at most, evenly spaced; all by default.
        logit_scaled: if true, return the model's logit, exp(logit_scale)·cosine (+ bias), instead of the cosine.
        allow_random: open_clip only: if there are no weights to load, score with untrained weights (always the same
            ones).
        preprocess: open_clip only: values that replace entries of the model's own preprocessing: size, mean, std,
            interpolation, resize_mode ("shortest", "longest" or "squash"), fill_color.

    Raises:
        ValueError: there is no such model or checkpoint, or the weights do not fit the architecture.
    """

    name = "clip_score"

    def __init__(
        self,
        model: str = "ViT-B-32-quickgelu",
        pretrained: str | None = None,
        *,
        backend: str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int | None = None,
        logit_scaled: bool = False,
        allow_random: bool = False,
        preprocess: Mapping[str, Any] | None = None,
    ) -> None:
        if backend not in (None, *BACKENDS):
            raise ValueError(f"clip_score: backend is {backend!r}; give one of {', '.join(BACKENDS)}")
        if backend == "transformers" or (backend is None and _is_transformers(model)):
            if pretrained is not None or preprocess or allow_random:
                raise ValueError(
                    "clip_score: a folder of transformers has its own weights and preprocessing; leave `pretrained`, "
                    "`preprocess` and `allow_random` out"
                )
            lease = transformers_towers("clip_score", model, device=device, dtype=dtype)
        else:
            lease = open_clip_towers(
                "clip_score",
                model,
                pretrained,
                device=device,
                dtype=dtype,
                preprocess=preprocess,
                allow_random=allow_random,
            )
        super().__init__(lease, batch_size=batch_size, frames=frames)
        self.logit_scaled = logit_scaled

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Tensor:
        """Cosine (or logit) of each image with its prompt.

        Args:
            images: [B, 3, H, W] in [0, 1]; for videos [B, F, 3, H, W] the frames' scores are averaged.
            prompts: B strings, truncated at the model's context length.
            columns: ignored.

        Returns:
            [B] float32.
        """
        cosine = self.cosines(images, prompts)
        towers = self.lease.value
        return towers.scale * cosine + towers.bias if self.logit_scaled else cosine


def _is_transformers(model: str) -> bool:
    folder = Path(model).expanduser()
    return (folder / "config.json").is_file() and not (folder / "open_clip_config.json").is_file()
