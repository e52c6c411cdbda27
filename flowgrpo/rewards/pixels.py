"""Preparation of images for a scorer: files, frames of videos, 8-bit pictures, and resampling."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


def load_picture(path: Path) -> Tensor:
    """Load a picture as [3, H, W] in [0, 1], rotated as its EXIF data say. Transparent areas become white.

    Raises:
        ValueError: the file cannot be read, or has more than 8 bits for each colour.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            check_depth(path, opened)
            image = ImageOps.exif_transpose(opened)
            if image.has_transparency_data:
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image.convert("RGBA"))
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as a picture: {error}") from None
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


def load_frames(path: Path, frames: int) -> Tensor:
    """Load a video whose frames stand side by side in a picture, as [F, 3, H, W] in [0, 1]; a picture is one frame.

    Raises:
        ValueError: the file cannot be read, or the picture cannot be cut into so many frames of equal width.
    """
    strip = load_picture(path)
    check_cut(path, strip.shape[-1], frames)
    return strip.unflatten(-1, (frames, -1)).movedim(-2, 0)


def check_depth(path: Path, picture: Image) -> None:
    """Raise ValueError if a picture has more than 8 bits for each colour; only its header need be read."""
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"{path} has pixels of mode {picture.mode}; save it with 8 bits for each colour")


def check_cut(path: Path, width: int, frames: int) -> None:
    """Raise ValueError if a picture of so many pixels cannot be cut into so many frames."""
    if frames < 1 or width % frames:
        raise ValueError(f"{path} is {width} pixels wide and cannot hold {frames} frames of equal width")


def check_single(reward: str, images: Tensor) -> None:
    """Raise ValueError if a reward of pictures gets something other than [B, 3, H, W], such as videos."""
    if images.ndim != 4:
        raise ValueError(f"{reward}: images have shape {list(images.shape)}; give single images [B, 3, H, W]")


def as_frames(images: Tensor, most: int | None = None) -> Tensor:
    """Return images as videos of one frame, and videos as they are or with fewer frames.

    Args:
        images: [B, 3, H, W] or [B, F, 3, H, W].
        most: how many frames are kept of a video that has more. They are evenly spaced and include the first and the
            last frame; 1 keeps the middle frame. None keeps all.

    Returns:
        [B, F, 3, H, W].

    Raises:
        ValueError: `images` has another shape.
    """
    if images.ndim not in (4, 5) or images.shape[-3] != 3:
        raise ValueError(f"images have shape {list(images.shape)}; give [B, 3, H, W] or [B, F, 3, H, W]")
    frames = images if images.ndim == 5 else images.unsqueeze(1)
    count = frames.shape[1]
    if most is None or count <= most:
        return frames
    places = [(count - 1) // 2] if most == 1 else [round(k * (count - 1) / (most - 1)) for k in range(most)]
    return frames[:, places]


def to_bytes(images: Tensor) -> Tensor:
    """Convert floats in [0, 1] to 8-bit levels, uint8. They are rounded, because truncation would darken the image.

    Levels in 8 bits stay as they are.
    """
    return images if images.dtype == torch.uint8 else (images.float() * 255).round().clamp(0, 255).to(torch.uint8)


def preprocess_images(images: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Apply open_clip's inference preprocessing to float tensors.

    open_clip's own transform takes 8-bit PIL pictures. This function does the same resampling: antialiased, and clamped
    as 8-bit bicubic is. It does not round, and it does not divide by 255, because the images are in [0, 1] already.

    Args:
        images: [B, 3, H, W] in [0, 1].
        config: `size` (int or (height, width)), `mean`, `std`, `interpolation`, `resize_mode`, `fill_color`.

    Returns:
        [B, 3, *size], normalised.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F

    size = config["size"]
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
    old_height, old_width = images.shape[-2:]
    mode = config.get("resize_mode") or "shortest"
    fill = float(config.get("fill_color") or 0) / 255
    if mode == "squash":
        target = (height, width)
    elif mode == "shortest" and height == width:
        # torchvision, which open_clip uses here, truncates the longer side; open_clip's own resize rounds.
        short = min(old_height, old_width)
        target = (height * old_height // short, width * old_width // short)
    else:
        ratios = (old_height / height, old_width / width)
        ratio = max(ratios) if mode == "longest" else min(ratios)
        target = (max(1, round(old_height / ratio)), max(1, round(old_width / ratio)))
    bilinear = config.get("interpolation") == "bilinear"
    interpolation = InterpolationMode.BILINEAR if bilinear else InterpolationMode.BICUBIC
    resized = F.resize(images, list(target), interpolation, antialias=True).clamp(0, 1)
    pad_h, pad_w = max(0, height - target[0]), max(0, width - target[1])
    padding = [pad_w // 2, pad_h // 2, (pad_w + 1) // 2, (pad_h + 1) // 2]
    padded = F.pad(resized, padding, fill=fill) if any(padding) else resized
    return F.normalize(F.center_crop(padded, [height, width]), config["mean"], config["std"])
