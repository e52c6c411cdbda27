"""PickScore: which of two images for one prompt people preferred.

Kirstain et al., "Pick-a-Pic: An Open Dataset of User Preferences for Text-to-Image Generation" (2305.01569), equation
1: a CLIP model fine-tuned on people's choices. The score is the model's logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..backbones.towers import TowerReward, transformers_towers
from ..options import check_positive
from ..scores import Scores

PUBLISHED = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class PickScore(TowerReward):
    """Human preference: PickScore's logit divided by 26, about 0.65 to 0.92.

    Args:
        model: folder or model id of a transformers `CLIPModel`.
        processor: folder or model id of the image processor and the tokenizer. The default is LAION's CLIP-H for the
            published model, and `model` otherwise.
        divisor: the logit, exp(logit_scale)·cosine, is divided by this number. 26 is usual in training; 1 gives the
            logit itself, about 17 to 24.
        device: where to score.
        dtype: data type of the weights.
        batch_size: largest number of images in one call.
        frames: how many frames of a video are scored at most, evenly spaced; all by default.

    Raises:
        ValueError: the folder holds no such model or processor, or an option cannot be used.
    """

    name = "pickscore"

    def __init__(
        self,
        model: str = PUBLISHED,
        *,
        processor: str | None = None,
        divisor: float = 26.0,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int | None = None,
    ) -> None:
        check_positive("pickscore", "divisor", divisor)
        processor = PROCESSOR if processor is None and model == PUBLISHED else processor
        lease = transformers_towers("pickscore", model, processor=processor, device=device, dtype=dtype)
        super().__init__(lease, batch_size=batch_size, frames=frames)
        self.divisor = divisor

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Preference for each image, given its prompt.

        Args:
            images: [B, 3, H, W] in [0, 1]; for videos [B, F, 3, H, W] the frames' scores are averaged.
            prompts: B strings, truncated at 77 tokens.
            columns: ignored.

        Returns:
            B scores; sub-score `cosine`.
        """
        cosine = self.cosines(images, prompts)
        return Scores(self.lease.value.scale * cosine / self.divisor, {"cosine": cosine.tolist()})
