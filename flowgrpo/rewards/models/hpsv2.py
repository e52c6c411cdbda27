"""HPS v2.1: which of several images for one prompt people preferred.

Wu et al., "Human Preference Score v2" (2306.09341): CLIP ViT-H/14 fine-tuned on HPDv2; the score is the cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..backbones.model_loading import find_file
from ..backbones.open_clip_model import open_clip_towers
from ..backbones.towers import TowerReward


class HpsV2(TowerReward):
    """Human preference: HPS v2.1's cosine of image and prompt, about 0.15 to 0.36.

    An image is scaled so that its longer side has 224 pixels, and the rest of the square is black, as in the model's
    training. CLIP's own cropping to a square would change the scores of images that are not square.

    Args:
        checkpoint: path of `HPS_v2.1_compressed.pt` (or of the file of v2.0), or "hf-hub:ORG/NAME/FILE".
        model: open_clip architecture, or the path of a `.json` architecture file.
        device: where to score.
        dtype: data type of the weights.
        batch_size: largest number of images in one call.
        frames: how many frames of a video are scored at most, evenly spaced; all by default.

    Raises:
        ValueError: there is no such file, or it does not fit the architecture.
    """

    name = "hpsv2"

    def __init__(
        self,
        checkpoint: str = "hf-hub:xswu/HPSv2/HPS_v2.1_compressed.pt",
        *,
        model: str = "ViT-H-14",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int | None = None,
    ) -> None:
        lease = open_clip_towers(
            "hpsv2",
            model,
            str(find_file("hpsv2", "checkpoint", checkpoint)),
            device=device,
            dtype=dtype,
            preprocess={"resize_mode": "longest", "fill_color": 0},
        )
        super().__init__(lease, batch_size=batch_size, frames=frames)

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Tensor:
        """Preference for each image, given its prompt.

        Args:
            images: [B, 3, H, W] in [0, 1]; for videos [B, F, 3, H, W] the frames' scores are averaged.
            prompts: B strings, truncated at 77 tokens.
            columns: ignored.

        Returns:
            [B] float32.
        """
        return self.cosines(images, prompts)
