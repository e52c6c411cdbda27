"""A smooth reward of the embedded world: how near the amounts of each colour are to what a prompt asks for.

The reward measures paint and does not look at shapes, places or relations. So it does not say whether a prompt is
satisfied. Any change of a picture that adds, removes or tints paint changes it a little. So it is fit for comparing
methods by short runs, where the verifier (`gold`) hardly moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...rewards.base import Scores
from ...rewards.options import check_positive
from .draw import COLOURS, SIZE, mask
from .scene_prompts import Item, radius_range, read_items

# Squared distance of RGB values in [0, 1] at which a pixel's share of a colour has fallen to 1/e.
SOFTNESS = 0.01
_NAMES = tuple(COLOURS)


def paint(images: Tensor) -> Tensor:
    """The area of each colour of the palette in a picture, in pixels of a picture of 64×64.

    A pixel is explained as `ground + cover · (colour − ground)` by each colour. Its cover is divided among the colours
    by how well they explain it, so that the area changes smoothly with the pixel.

    Args:
        images: [B, 3, H, W] in [0, 1]. The ground is the median of the border, for each channel.

    Returns:
        [B, 6] float32, with the colours in the order of `COLOURS`.
    """
    border = torch.cat([images[:, :, 0], images[:, :, -1], images[:, :, :, 0], images[:, :, :, -1]], dim=2)
    ground = border.quantile(0.5, dim=2)
    offset = images.flatten(2) - ground[:, :, None]
    direction = torch.tensor([COLOURS[name] for name in _NAMES], dtype=images.dtype)[None] - ground[:, None]
    length = direction.square().sum(2, keepdim=True)
    cover = (torch.einsum("bkc,bcp->bkp", direction, offset) / length).clamp(0, 1)
    # |offset − cover · direction|², without an array of colours, channels and pixels.
    crossed = torch.einsum("bkc,bcp->bkp", direction, offset)
    residual = offset.square().sum(1, keepdim=True) - 2 * cover * crossed + cover.square() * length
    return (cover * torch.softmax(-residual / SOFTNESS, dim=1)).mean(2) * SIZE**2


@lru_cache(maxsize=64)
def area_of(shape: str, things: int) -> float:
    """Mean area in pixels of a shape in a drawn scene of so many things."""
    low, high = radius_range(things)
    halves = np.arange(math.ceil(2 * low), math.floor(2 * high) + 1) / 2
    return float(np.mean([mask(shape, float(radius)).sum() for radius in halves]))


def wanted(items: Sequence[Item], amount: float = 1.0) -> tuple[Tensor, float]:
    """The area that items ask for, times `amount`: of each colour [6], and of any colour; in pixels."""
    named, free = torch.zeros(len(_NAMES)), 0.0
    things = sum(item.count for item in items)
    for item in items:
        area = amount * item.count * area_of(item.shape, things)
        if item.colour is None:
            free += area
        else:
            named[_NAMES.index(item.colour)] += area
    return named, free


def likeness(found: Tensor, named: Tensor, free: float) -> float:
    """1 minus the paint that is missing or too much, divided by the paint that is shown and asked for; in [0, 1].

    Args:
        found: area of each colour [6], in pixels of a picture of 64×64.
        named: area asked for of each colour [6].
        free: area asked for of any colour. What exceeds the named areas may fill it.
    """
    missing = float((named - found).clamp(min=0).sum())
    beyond = float((found - named).clamp(min=0).sum())
    return 1 - (missing + abs(beyond - free)) / (float(found.sum() + named.sum()) + free)


class Paint:
    """Likeness of the amounts of each colour in a picture to the amounts that its prompt asks for, in [0, 1].

    1 means that the picture has exactly the paint of each colour that is asked for. 0 means that it has no paint that
    is asked for. Where a prompt names no colour, any colour fits. The score says nothing about shapes, places and
    relations.

    Args:
        amount: how much paint is asked for, as a multiple of the mean drawn scene of the prompt. At 1, drawn scenes
            have about 0.94 and the embedded model starts at 0.87. At 2, things should have twice their usual area.

    Raises:
        ValueError: `amount` is not a finite number above 0.

    The prompt file's `include` column (GenEval's form) says what is asked for; a prompt without it is not applicable
    (NaN). Images are [B, 3, H, W] in [0, 1]; their size does not matter.
    """

    def __init__(self, amount: float = 1.0) -> None:
        check_positive("paint", "amount", amount)
        self.amount = float(amount)

    def __call__(self, images: Tensor, prompts: Sequence[str], include: Sequence[Any] | None = None) -> Scores:
        """Score a batch; raises ValueError for an `include` entry that this world does not know."""
        asked = include if include is not None else [None] * len(prompts)
        areas = paint(images.detach().float().cpu())
        values, notes = [], []
        for found, entries in zip(areas, asked, strict=True):
            if entries is None:
                values.append(float("nan"))
                notes.append("no `include` column")
                continue
            named, free = wanted(read_items(entries), self.amount)
            values.append(likeness(found, named, free))
            shown = ", ".join(f"{area:.0f} {name}" for name, area in zip(_NAMES, found.tolist()) if area >= 1)
            notes.append(f"pixels of paint: {shown or 'none'}; asked for {float(named.sum()) + free:.0f}")
        return Scores(values, notes=notes)
