"""Drawing of scenes: coloured shapes on a light ground, 64×64 pixels, antialiased.

Coordinates are in pixels, x to the right and y downwards. Colours are RGB in [0, 1]. A shape is described by its centre
and a radius. The shapes are scaled so that shapes with equal radii look about equally large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIZE = 64
SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.87, 0.14, 0.16),
    "orange": (0.97, 0.55, 0.10),
    "yellow": (0.97, 0.85, 0.12),
    "green": (0.13, 0.62, 0.27),
    "blue": (0.14, 0.34, 0.88),
    "purple": (0.55, 0.20, 0.70),
}
GROUND = (0.93, 0.93, 0.93)

_SUPERSAMPLE = 8


@dataclass(frozen=True)
class Thing:
    """One shape in a scene: name, colour name, centre (x, y) and radius in pixels."""

    shape: str
    colour: str
    x: int
    y: int
    radius: float


def outline(shape: str, radius: float) -> list[tuple[float, float]]:
    """Corners of `shape` around the origin, in pixels; a circle has 48 corners."""
    if shape == "circle":
        return _polygon(48, radius, 0.0)
    if shape == "square":
        half = 0.9 * radius
        return [(-half, -half), (half, -half), (half, half), (-half, half)]
    if shape == "triangle":
        return [(x, y + 0.2 * radius) for x, y in _polygon(3, 1.3 * radius, -math.pi / 2)]
    if shape == "star":
        outer, inner = _polygon(5, 1.3 * radius, -math.pi / 2), _polygon(5, 0.58 * radius, -0.3 * math.pi)
        return [corner for pair in zip(outer, inner) for corner in pair]
    if shape == "cross":
        arm, half = 1.1 * radius, 0.4 * radius
        return [
            (-half, -arm), (half, -arm), (half, -half), (arm, -half), (arm, half), (half, half),
            (half, arm), (-half, arm), (-half, half), (-arm, half), (-arm, -half), (-half, -half),
        ]  # fmt: skip
    raise ValueError(f"unknown shape {shape!r}; write one of {', '.join(SHAPES)}")


def _polygon(corners: int, radius: float, first: float) -> list[tuple[float, float]]:
    angles = (first + 2 * math.pi * k / corners for k in range(corners))
    return [(radius * math.cos(a), radius * math.sin(a)) for a in angles]


@lru_cache(maxsize=1024)
def mask(shape: str, radius: float) -> NDArray[np.float32]:
    """Coverage in [0, 1] of `shape` on a square patch with an odd side; the centre is in the middle pixel."""
    half = math.ceil(1.35 * radius) + 1
    side = (2 * half + 1) * _SUPERSAMPLE
    canvas = Image.new("L", (side, side), 0)
    corners = [((x + half + 0.5) * _SUPERSAMPLE, (y + half + 0.5) * _SUPERSAMPLE) for x, y in outline(shape, radius)]
    ImageDraw.Draw(canvas).polygon(corners, fill=255)
    coverage = np.asarray(canvas.reduce(_SUPERSAMPLE), dtype=np.float32) / 255.0
    coverage.setflags(write=False)
    return coverage


def draw(things: Sequence[Thing], ground: tuple[float, float, float] = GROUND) -> NDArray[np.float32]:
    """Render a scene as an array [64, 64, 3] in [0, 1]; later things cover earlier ones."""
    canvas = np.empty((SIZE, SIZE, 3), dtype=np.float32)
    canvas[:] = ground
    for thing in things:
        coverage = mask(thing.shape, thing.radius)
        half = coverage.shape[0] // 2
        top, left = thing.y - half, thing.x - half
        rows = slice(max(top, 0), min(top + coverage.shape[0], SIZE))
        columns = slice(max(left, 0), min(left + coverage.shape[1], SIZE))
        alpha = coverage[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left, None]
        colour = np.asarray(COLOURS[thing.colour], dtype=np.float32)
        canvas[rows, columns] += alpha * (colour - canvas[rows, columns])
    return canvas
