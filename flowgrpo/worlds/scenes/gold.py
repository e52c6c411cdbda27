"""Gold reward of the embedded world: a verifier that decides by rules what a scene shows.

The verifier splits the picture into colours by unmixing each pixel against the ground. It splits each colour into
connected components. It names each component by comparing the component's mask with rendered shapes. A prompt is
satisfied if the picture shows exactly what the prompt asks for: every item with its count, colour and relation, and
nothing else. This follows GenEval (2310.11513), with its "strict" count and without its tolerance for extra objects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from scipy.optimize import linear_sum_assignment

from ...rewards.base import Scores
from ...rewards.options import check_flag
from ...rewards.pixels import check_single
from .draw import COLOURS, SHAPES, Thing, mask
from .scene_prompts import Item, read_items

MIN_AREA = 14.0
MIN_COVER = 0.5
MIN_QUALITY = 0.72
# Share of the partial credit that remains if a relation is reversed, or if one of its things is missing.
UNRELATED = 0.25
_GRID = 16
_TICKS = np.linspace(-2.4, 2.4, _GRID)
_CROSS = ndimage.generate_binary_structure(2, 1)
_NOTHING = np.float32(0)
_COLOUR_NAMES = tuple(COLOURS)
_PALETTE = np.asarray(list(COLOURS.values()), dtype=np.float32)


@dataclass(frozen=True)
class Found:
    """A component of the picture: its best shape and colour, its centre and area in pixels, and its quality.

    The quality says how well the mask agrees with the rendered shape (intersection over union, in [0, 1]).
    """

    shape: str
    colour: str
    x: float
    y: float
    area: float
    quality: float

    @property
    def crisp(self) -> bool:
        """Whether the component is clean enough to count as its shape."""
        return self.quality >= MIN_QUALITY


def _hats(centres: NDArray[np.float64], spread: float, sizes: tuple[int, int]) -> list[NDArray[np.float64]]:
    """For each axis, weights [ticks, size] of linear interpolation at the ticks; 0 for ticks outside the samples."""
    at = (centres[:, None] + _TICKS * spread)[..., None]
    weights = np.maximum(1 - np.abs(at - np.arange(max(sizes))), 0)
    weights *= (at >= 0) & (at <= np.reshape(sizes, (2, 1, 1)) - 1)
    return [w[:, :size] for w, size in zip(weights, sizes)]


def _normalised(patch: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, float]:
    """A coverage patch, resampled to a fixed grid of ±2.4 standard deviations of its mass, and its centre x, y."""
    rows, columns = np.arange(patch.shape[0]), np.arange(patch.shape[1])
    by_row, by_column = patch.sum(1), patch.sum(0)
    total = patch.sum()
    y, x = (by_row @ rows) / total, (by_column @ columns) / total
    spread = math.sqrt((by_row @ (rows - y) ** 2 + by_column @ (columns - x) ** 2) / (2 * total) + 1e-6)
    down, across = _hats(np.array([y, x]), spread, (patch.shape[0], patch.shape[1]))
    return (down @ patch @ across.T).astype(np.float32), float(x), float(y)


@lru_cache(maxsize=1)
def _templates() -> NDArray[np.float32]:
    """Rendered shapes on the normalised grid, [shapes, variants, grid·grid]."""
    radii = (6.5, 8.0, 10.0, 12.0)
    return np.stack([np.stack([_normalised(mask(s, r))[0].ravel() for r in radii]) for s in SHAPES])


def _grown(own: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The mask with the four neighbours of its pixels. For such small masks, this takes a third of scipy's time."""
    grown = own.copy()
    grown[1:] |= own[:-1]
    grown[:-1] |= own[1:]
    grown[:, 1:] |= own[:, :-1]
    grown[:, :-1] |= own[:, 1:]
    return grown


def _extent(line: NDArray[np.bool_]) -> slice:
    """The range from one pixel before the first set pixel to one pixel after the last, within the picture."""
    places = line.nonzero()[0]
    return slice(max(int(places[0]) - 1, 0), int(places[-1]) + 2)


def _name(normalised: NDArray[np.float32]) -> tuple[str, float]:
    flat = normalised.ravel()
    templates = _templates()
    union = np.maximum(templates, flat).sum(-1)
    agreement = (np.minimum(templates, flat).sum(-1) / union).max(1)
    best = int(agreement.argmax())
    return SHAPES[best], float(agreement[best])


def find_things(image: NDArray[np.float32]) -> list[Found]:
    """The components of a picture [64, 64, 3] in [0, 1], in the order of colours and then of positions.

    Each pixel is explained as `ground + cover · (colour − ground)` by the palette colour with the smallest residual. A
    pixel with a cover of at least one half belongs to a component. Components of only a few pixels are noise and are
    left out.
    """
    # The picture is stored as one plane for each channel. This takes a third less time than channels side by side.
    planes = image.transpose(2, 0, 1)
    border = np.concatenate([planes[:, 0], planes[:, -1], planes[:, :, 0], planes[:, :, -1]], axis=1)
    middle = border.shape[1] // 2
    ground = np.sort(border, axis=1)[:, middle - 1 : middle + 1].mean(1)
    direction = _PALETTE - ground
    length = (direction**2).sum(1)
    cover = (direction / length[:, None]) @ (planes.reshape(3, -1) - ground[:, None])
    # |offset - cover · direction|² = |offset|² - cover² · |direction|² is smallest where the last term is largest.
    explained = cover**2 * length[:, None]
    owned = explained == explained.max(0)
    strength = (cover * owned).max(0).clip(max=1.0).reshape(image.shape[:2])
    solid = owned.reshape(-1, *strength.shape) & (strength >= MIN_COVER)
    things: list[Found] = []
    for colour, plane in zip(_COLOUR_NAMES, solid):
        if np.count_nonzero(plane) < MIN_AREA:
            continue
        down, right = _extent(plane.any(1)), _extent(plane.any(0))
        labels, _ = ndimage.label(plane[down, right], _CROSS)
        covers = strength[down, right]
        for index, box in enumerate(ndimage.find_objects(labels), start=1):
            own = labels[box] == index
            if np.count_nonzero(own) < MIN_AREA:
                continue
            rows = slice(max(box[0].start - 1, 0), box[0].stop + 1)
            columns = slice(max(box[1].start - 1, 0), box[1].stop + 1)
            around = labels[rows, columns]
            own = around == index
            near = _grown(own) & ((around == 0) | own)
            patch = np.where(near, covers[rows, columns], _NOTHING)
            normalised, x, y = _normalised(patch)
            shape, quality = _name(normalised)
            x, y = x + (columns.start + right.start), y + (rows.start + down.start)
            things.append(Found(shape, colour, x, y, float(patch.sum()), quality))
    return things


def _seen(relation: str, one: Found | Thing, other: Found | Thing) -> tuple[float, float]:
    """Offset of `one` from `other` in pixels: along the relation's direction, and across it to either side."""
    dx, dy = one.x - other.x, one.y - other.y
    along, across = (dx, dy) if relation in ("left of", "right of") else (dy, dx)
    return (0.0 - along if relation in ("left of", "above") else along), abs(across)


def holds(relation: str, one: Found | Thing, other: Found | Thing) -> bool:
    """Whether `one` lies within 45° of the relation's direction from `other`."""
    along, across = _seen(relation, one, other)
    return along > across


def _relation_credit(relation: str, one: Found | Thing, other: Found | Thing) -> float:
    """1 if the relation holds; else it falls with the angle, from 0.75 at 45° to 0.25 in the opposite direction."""
    if holds(relation, one, other):
        return 1.0
    along, across = _seen(relation, one, other)
    angle = max(math.atan2(across, along), math.pi / 4)
    return UNRELATED + (1 - 2 * UNRELATED) * (math.pi - angle) / (0.75 * math.pi)


def _words(thing: Found) -> str:
    return f"{'' if thing.crisp else 'unclear '}{thing.colour} {thing.shape}"


def _match(wanted: Item, thing: Found) -> float:
    """How well a thing fits an item, in [0, 1]: half for the shape, scaled by its quality, and half for the colour."""
    clean = min(thing.quality / MIN_QUALITY, 1.0)
    if wanted.colour is None:
        return clean * (thing.shape == wanted.shape)
    return 0.5 * clean * (thing.shape == wanted.shape) + 0.5 * (thing.colour == wanted.colour)


def verify(things: Sequence[Found], items: Sequence[Item]) -> tuple[bool, float, str]:
    """Whether the things are exactly what the items ask for, a partial credit in [0, 1], and a note in words.

    The partial credit is the sum over the best assignment of found things to wanted things, divided by the larger of
    the two counts. An unmet relation removes between a quarter and three quarters of the credit; the farther the things
    are from where they should be, the more it removes. The credit is 1 if and only if the prompt is satisfied.
    """
    note = ", ".join(map(_words, things)) or "nothing"
    wanted = [(k, item) for k, item in enumerate(items) for _ in range(item.count)]
    if not things:
        return False, 0.0, f"found {note}"
    credit = np.array([[_match(item, thing) for thing in things] for _, item in wanted])
    rows, columns = linear_sum_assignment(credit, maximize=True)
    soft = float(credit[rows, columns].sum()) / max(len(wanted), len(things))
    chosen = {wanted[r][0]: things[c] for r, c in zip(rows, columns)}
    held = [
        _relation_credit(item.relation, chosen[k], chosen[item.other])
        if k in chosen and item.other in chosen
        else UNRELATED
        for k, item in enumerate(items)
        if item.relation is not None
    ]
    if any(credit < 1.0 for credit in held):
        soft, note = soft * min(held), f"{note}; the relation does not hold"
    satisfied = soft >= 1.0 - 1e-6
    return satisfied, soft, f"found {note}"


class Gold:
    """Verifier of the embedded scenes: 1 if the picture shows exactly what the prompt asks for, else 0.

    Args:
        dense: return the partial credit in [0, 1] instead of 0 or 1; both are 1 for the same pictures.

    The verifier reads the prompt file's `include` column (GenEval's form); a prompt without it is not applicable (NaN).
    Images are [B, 3, 64, 64] in [0, 1]. Both scores are reported as sub-scores, `satisfied` and `partial`. The
    `answers` name the found things without their places, and say if a requested relation does not hold.
    """

    def __init__(self, dense: bool = False) -> None:
        check_flag("gold", "dense", dense)
        self.dense = dense

    def __call__(self, images: torch.Tensor, prompts: Sequence[str], include: Sequence[Any] | None = None) -> Scores:
        """Score a batch; raises ValueError for videos, and for an `include` entry that this world does not know."""
        check_single("gold", images)
        pixels = images.detach().float().cpu().permute(0, 2, 3, 1).numpy()
        asked = include if include is not None else [None] * len(prompts)
        strict, partial, notes = [], [], []
        answers: list[str | None] = []
        for picture, entries in zip(pixels, asked, strict=True):
            if entries is None:
                strict.append(float("nan"))
                partial.append(float("nan"))
                notes.append("no `include` column")
                answers.append(None)
                continue
            things = find_things(picture)
            satisfied, soft, note = verify(things, read_items(entries))
            strict.append(float(satisfied))
            partial.append(soft)
            notes.append(note)
            # Things are found in the order of their places, but an answer must not depend on places.
            said = ", ".join(sorted(map(_words, things))) or "nothing"
            answers.append(said + "".join(note.partition(";")[1:]))
        values = partial if self.dense else strict
        return Scores(values, sub_scores={"satisfied": strict, "partial": partial}, notes=notes, answers=answers)
