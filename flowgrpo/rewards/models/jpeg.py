"""JPEG size as a reward: the standard first experiment, because it needs no model and improves quickly.

Black et al., "Training Diffusion Models with Reinforcement Learning" (2023), section 5.1. Sizes grow with resolution,
so compare them only between images of the same resolution.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..pixels import as_frames, to_bytes
from ..scores import Scores


def jpeg_kilobytes(images: Tensor, quality: int = 95) -> list[float]:
    """Return the size of each image as a JPEG file, in units of 1000 bytes, with 4:2:0 chroma subsampling.

    Args:
        images: [B, 3, H, W] in [0, 1]; or videos [B, F, 3, H, W], whose frames' sizes are averaged.
        quality: JPEG quality, 1 to 100.

    Returns:
        B sizes.

    Raises:
        ValueError: `images` has another shape.
    """
    from PIL import Image

    pixels = to_bytes(as_frames(images)).movedim(2, -1).cpu().numpy()
    sizes = []
    for video in pixels:
        lengths = []
        for frame in video:
            buffer = io.BytesIO()
            Image.fromarray(frame).save(buffer, format="JPEG", quality=quality, subsampling="4:2:0")
            lengths.append(buffer.tell())
        sizes.append(sum(lengths) / len(lengths) / 1000)
    return sizes


class _JpegSize:
    scale: float

    def __init__(self, quality: int = 95) -> None:
        if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= 100:
            raise ValueError(
                f"JPEG `quality` is {quality!r}; give a whole number from 1 to 100 (95 is the published setting)"
            )
        self.quality = quality

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        sizes = jpeg_kilobytes(images, self.quality)
        return Scores([self.scale * size for size in sizes], {"kilobytes": sizes})


class JpegCompressibility(_JpegSize):
    """Small JPEG files: minus the size in kilobytes, divided by 500 (quality 95)."""

    scale = -1 / 500


class JpegIncompressibility(_JpegSize):
    """Large JPEG files: the size in kilobytes (quality 95)."""

    scale = 1.0
