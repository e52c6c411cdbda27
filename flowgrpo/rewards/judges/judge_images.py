"""Images in the form in which they are sent to vision-language models."""

from __future__ import annotations

import base64

import torch
from torch import Tensor

from ..pixels import to_bytes
from ..serving.wire import png


def data_urls(media: Tensor, side: int | None = None, frames: int = 8) -> list[str]:
    """Return data URLs of PNG files: one for an image, several for a video.

    Args:
        media: an image [3, H, W] or a video [F, 3, H, W], in [0, 1].
        side: images with a longer side, in pixels, are shrunk to this side; None shrinks nothing.
        frames: how many frames of a video are used at most.

    Returns:
        One text for each image or chosen frame, in order.
    """
    pixels = to_bytes(shrunk(frames_of(media, frames).detach().float().cpu(), side))
    return [f"data:image/png;base64,{base64.b64encode(png(frame)).decode('ascii')}" for frame in pixels]


def frames_of(media: Tensor, most: int) -> Tensor:
    """Return at most `most` frames [N, 3, H, W] of a video, evenly spaced, or the image as the only one."""
    return media.unsqueeze(0) if media.ndim == 3 else media[chosen_frames(len(media), most)]


def chosen_frames(count: int, most: int) -> list[int]:
    """Return the places of at most `most` of `count` frames, evenly spaced from first to last; 1 is the middle one."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count // 2]
    return [round(k * (count - 1) / (most - 1)) for k in range(most)]


def shrunk(images: Tensor, side: int | None) -> Tensor:
    """Shrink images [N, 3, H, W] until the longest side has at most `side` pixels; bicubic with antialiasing."""
    longest = max(images.shape[-2:])
    if side is None or longest <= side:
        return images
    size = [max(1, round(length * side / longest)) for length in images.shape[-2:]]
    return torch.nn.functional.interpolate(images, size=size, mode="bicubic", antialias=True).clamp(0, 1)
