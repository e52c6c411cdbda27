"""Likeness of samples to target pictures, pixel by pixel, as restoration and editing are judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from ..options import check_count
from ..pixels import check_single
from ..targets import targets_like

ROUNDED = 1e-6
"""A mean squared error below it counts as this one, 60 dB. The rounding of pixels to 8 bits alone gives 58.9 dB."""
TAPS, SIGMA = 11, 1.5
K1, K2 = 0.01, 0.03


class _Likeness:
    """Base class of the rewards that compare pixels with the picture of the column `target_image`."""

    name: str

    def __init__(self, *, batch_size: int = 16) -> None:
        check_count(self.name, "batch_size", batch_size)
        self.batch_size = batch_size

    def _pairs(self, images: Tensor, target_image: Sequence[Any]) -> tuple[Tensor, Tensor]:
        check_single(self.name, images)
        found = images.float()
        return found, targets_like(self.name, found, target_image)


class Psnr(_Likeness):
    """Likeness to the picture in column `target_image`: the peak signal-to-noise ratio, 0 to 60 dB. It has a gradient.

    The mean squared error is over all pixels and colours. A target of another size is scaled to the size of the sample.

    Args:
        batch_size: largest number of images in one call.
    """

    name = "psnr"

    def __call__(self, images: Tensor, target_image: Sequence[Any], **columns: Any) -> Tensor:
        """The PSNR of each image, in decibels.

        Args:
            images: [B, 3, H, W] in [0, 1].
            target_image: B paths of pictures.
            columns: ignored.

        Returns:
            [B] float32.

        Raises:
            ValueError: a picture cannot be read, its proportions differ from the samples', or the samples are videos.
        """
        found, wanted = self._pairs(images, target_image)
        return -10.0 * (found - wanted).square().flatten(1).mean(1).clamp(min=ROUNDED).log10()


class Ssim(_Likeness):
    """Likeness to the picture in column `target_image`: structural similarity, -1 to 1. It has a gradient.

    Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity" (2004), equation 13, with
    the paper's Gaussian window of 11 pixels and constants 0.01 and 0.03. It is the mean over all places at which the
    window fits, and over the three colours. A target of another size is scaled to the size of the sample.

    Args:
        batch_size: largest number of images in one call.
    """

    name = "ssim"

    def __call__(self, images: Tensor, target_image: Sequence[Any], **columns: Any) -> Tensor:
        """The SSIM of each image.

        Args:
            images: [B, 3, H, W] in [0, 1], with sides of 11 pixels or more.
            target_image: B paths of pictures.
            columns: ignored.

        Returns:
            [B] float32.

        Raises:
            ValueError: a picture cannot be read, its proportions differ from the samples', or the samples are videos or
                too small.
        """
        found, wanted = self._pairs(images, target_image)
        if min(found.shape[-2:]) < TAPS:
            raise ValueError(f"ssim: images have shape {list(found.shape)}; give sides of {TAPS} pixels or more")
        return structural_similarity(found, wanted)


def structural_similarity(first: Tensor, second: Tensor) -> Tensor:
    """The SSIM [B] of images [B, C, H, W] in [0, 1], mean over places and channels."""
    offsets = torch.arange(TAPS, device=first.device) - TAPS // 2
    taps = torch.exp(-offsets.square() / (2 * SIGMA**2))
    taps = (taps / taps.sum()).to(first.dtype)

    def local_mean(values: Tensor) -> Tensor:
        flat = values.flatten(0, 1).unsqueeze(1)
        smooth = conv2d(conv2d(flat, taps.view(1, 1, -1, 1)), taps.view(1, 1, 1, -1))
        return smooth.squeeze(1).unflatten(0, values.shape[:2])

    mean, other = local_mean(first), local_mean(second)
    variance = local_mean(first.square()) - mean.square()
    other_variance = local_mean(second.square()) - other.square()
    covariance = local_mean(first * second) - mean * other
    light = (2 * mean * other + K1**2) / (mean.square() + other.square() + K1**2)
    structure = (2 * covariance + K2**2) / (variance + other_variance + K2**2)
    return (light * structure).flatten(1).mean(1)
