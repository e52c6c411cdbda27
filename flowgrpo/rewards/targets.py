"""Pictures that rewards compare samples with: the column `target_image` of the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .pixels import load_picture, preprocess_images

SQUASHED = 1.03
"""Largest factor between the proportions of a target and of a sample. Pipelines round the sides to 16 or 32."""


def load_targets(reward: str, column: Sequence[Any]) -> tuple[list[Tensor], list[int]]:
    """Load the pictures of a column of B paths, each file once.

    Args:
        reward: name of the reward, for messages.
        column: B paths.

    Returns:
        The pictures, [3, h, w] in [0, 1], and for each of the B rows the number of its picture.

    Raises:
        ValueError: a row has no path, or a file cannot be read as a picture.
    """
    places: dict[str, int] = {}
    for row, path in enumerate(column):
        if not isinstance(path, str) or not path:
            raise ValueError(
                f"{reward}: the column `target_image`, row {row}, has {path!r:.80}; give the path of a picture"
            )
        places.setdefault(path, len(places))
    return [load_picture(Path(path)) for path in places], [places[path] for path in column]


def targets_like(reward: str, images: Tensor, column: Sequence[Any]) -> Tensor:
    """The pictures of a column of B paths, scaled to the size of images [B, 3, H, W], on the device of the images.

    Raises:
        ValueError: see `load_targets`; or the proportions of a picture differ from the proportions of the images.
    """
    pictures, rows = load_targets(reward, column)
    height, width = images.shape[-2:]
    scaled = []
    for number, picture in enumerate(pictures):
        own_height, own_width = picture.shape[-2:]
        stretch = (own_width * height) / (own_height * width)
        if not 1 / SQUASHED <= stretch <= SQUASHED:
            raise ValueError(
                f"{reward}: {column[rows.index(number)]} has {own_width} × {own_height} pixels and the sample has "
                f"{width} × {height}; crop the target to the proportions of the samples, or sample in the target's"
            )
        if (own_height, own_width) != (height, width):
            config = {"size": (height, width), "resize_mode": "squash", "interpolation": "bicubic"}
            picture = preprocess_images(picture[None], {**config, "mean": [0.0] * 3, "std": [1.0] * 3})[0]
        scaled.append(picture)
    return torch.stack(scaled).to(images.device)[rows]
