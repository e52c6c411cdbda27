"""Likeness of a sample to a target picture as a frozen image encoder sees it: the DINO score and CLIP-I."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backbones.towers import TowerReward
from ..targets import load_targets
from .picture_features import feature_towers


class ImageSimilarity(TowerReward):
    """Likeness to the picture in column `target_image`: cosine of the features of DINO or CLIP. It has a gradient.

    With DINO this is the DINO score, and with CLIP it is CLIP-I, by which DreamBooth (2208.12242) measures whether a
    subject is kept. The target may have another size than the sample.

    Args:
        features: folder or model id of a DINOv2, DINOv3, CLIP or SigLIP model; "scenes" for the scorer of the embedded
            world.
        device: where to score.
        dtype: data type of the weights. Only float32 gives fine cosines; the others are coarse.
        batch_size: largest number of images in one call.
        frames: how many frames of a video are scored at most, evenly spaced; all by default.

    Raises:
        ValueError: the model cannot be loaded.
    """

    name = "image_similarity"

    def __init__(
        self,
        features: str = "facebook/dinov2-base",
        *,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int | None = None,
    ) -> None:
        lease = feature_towers(self.name, features, device, dtype)
        super().__init__(lease, batch_size=batch_size, frames=frames)

    def __call__(self, images: Tensor, target_image: Sequence[Any], **columns: Any) -> Tensor:
        """Cosine of each image with its target; for a video, the mean over its frames.

        Args:
            images: [B, 3, H, W] or [B, F, 3, H, W], in [0, 1].
            target_image: B paths of pictures.
            columns: ignored.

        Returns:
            [B] float32.

        Raises:
            ValueError: a picture cannot be read.
        """
        pictures, rows = load_targets(self.name, target_image)
        towers = self.lease.value
        with torch.no_grad():
            pixels = torch.cat([towers.prepare(picture[None]) for picture in pictures])
            wanted = torch.cat([towers.embed_pixels(part, remember=True) for part in pixels.split(self.batch_size)])
        return (self.embeddings(images) * wanted[rows].unsqueeze(1)).sum(-1).mean(1)
