"""SigLIP 2: how well text and image match, by a model that was trained on each pair separately.

Zhai et al., "Sigmoid Loss for Language Image Pre-Training" (2303.15343), section 3.2; Tschannen et al., "SigLIP 2"
(2502.14786).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backbones.towers import TowerReward, transformers_towers
from ..scores import Scores


class Siglip(TowerReward):
    """Text match: cosine of SigLIP 2's embeddings, or its probability that text and image belong together.

    Args:
        model: folder or model id of a transformers `SiglipModel`.
        probability: if true, return sigmoid(scale·cosine + bias) in place of the cosine. This probability is near 0 for
            most images, so it does not rank the images of a group well.
        lowercase: if true, convert prompts to lower case, as in the training of SigLIP 2.
        device: where to score.
        dtype: data type of the weights.
        batch_size: largest number of images in one call.
        frames: how many frames of a video are scored at most, evenly spaced; all by default.

    Raises:
        ValueError: the folder holds no such model or processor.
    """

    name = "siglip"

    def __init__(
        self,
        model: str = "google/siglip2-so400m-patch14-384",
        *,
        probability: bool = False,
        lowercase: bool = True,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int | None = None,
    ) -> None:
        lease = transformers_towers("siglip", model, device=device, dtype=dtype, lowercase=lowercase)
        super().__init__(lease, batch_size=batch_size, frames=frames)
        self.probability = probability

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Return how well each image matches its prompt.

        Args:
            images: [B, 3, H, W] in [0, 1], resized to the model's square input without keeping proportions; for videos
                [B, F, 3, H, W] the frames' cosines are averaged.
            prompts: B strings, truncated at 64 tokens.
            columns: ignored.

        Returns:
            B scores; sub-scores `cosine` and `probability`.
        """
        cosine = self.cosines(images, prompts)
        towers = self.lease.value
        probability = torch.sigmoid(towers.scale * cosine + towers.bias)
        subs = {"cosine": cosine.tolist(), "probability": probability.tolist()}
        return Scores(probability if self.probability else cosine, subs)
