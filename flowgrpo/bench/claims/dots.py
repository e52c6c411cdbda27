"""The figure of all claims: a row for each number that a claim is judged by, with its interval on a scale of its own.

A scale goes from left to right as the numbers do. The claimed side of the bound is shaded, a diamond marks the paper's
number, and a dot with a line marks what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .evidence import Measure

WIDTH, ROW, HEAD = 980, 26, 64
LEFT, RIGHT = 430, 190
TITLE = "Claims of the papers: measured (dot, 95 % interval) and claimed (diamond)"
_COLOURS = {
    "reproduced": ("#23804f", "#63c694"), "not reproduced": ("#b3303c", "#ee7d86"), "undecided": ("#8a6d00", "#d9b84a"),
}  # fmt: skip
_CLASSES = {verdict: f"v{k}" for k, verdict in enumerate(_COLOURS)}


@dataclass(frozen=True)
class Dots:
    """A number of a claim, with the short name of its paper and its own verdict."""

    paper: str
    measure: Measure
    verdict: str


def verdict_of(holds: bool | None) -> str:
    """The verdict on one number."""
    return {True: "reproduced", False: "not reproduced", None: "undecided"}[holds]


def draw_dots(rows: Sequence[Dots]) -> str:
    """The rows as an SVG document."""
    height = HEAD + ROW * max(len(rows), 1) + 12
    parts = [
        f'<text class="title" x="12" y="22">{TITLE}</text>',
        *_legend(),
    ]
    previous = ""
    for k, row in enumerate(rows):
        y = HEAD + ROW * k + ROW / 2
        if row.paper != previous:
            parts.append(f'<line class="grid" x1="12" x2="{WIDTH - 12}" y1="{y - ROW / 2}" y2="{y - ROW / 2}"/>')
            parts.append(f'<text class="name" x="12" y="{y + 4}">{escape(row.paper)}</text>')
        previous = row.paper
        parts.append(f'<text x="150" y="{y + 4}">{escape(row.measure.words)}</text>')
        parts += _scale(row, y)
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg {head} role="img">\n<style>{_style()}</style>\n' + "\n".join(parts) + "\n</svg>\n"


def _legend() -> list[str]:
    parts, x = [], 12.0
    for verdict, name in _CLASSES.items():
        parts.append(f'<circle class="{name}" cx="{x + 5}" cy="42" r="5"/><text x="{x + 15}" y="46">{verdict}</text>')
        x += 38 + 6.4 * len(verdict)
    parts.append(f'<rect class="good" x="{x}" y="35" width="22" height="14"/>')
    parts.append(f'<text x="{x + 28}" y="46">values that reproduce the claim</text>')
    parts.append(
        f'<path class="paper" d="{_diamond(x + 240, 42)}"/><text x="{x + 252}" y="46">the paper’s number</text>'
    )
    return parts


def _diamond(x: float, y: float) -> str:
    return f"M{x:.1f} {y - 6:.1f}l5 6l-5 6l-5 -6z"


def _scale(row: Dots, y: float) -> list[str]:
    """Band, bound, paper's number, interval and dot of one row, with its numbers in words."""
    measure, name = row.measure, _CLASSES[row.verdict]
    interval = measure.interval
    known = [v for v in (interval.mean, interval.low, interval.high) if math.isfinite(v)]
    anchors = [measure.bound, *([measure.claimed] if measure.claimed is not None else []), *known]
    low, high = min(anchors), max(anchors)
    pad = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = low - pad, high + pad
    end = WIDTH - RIGHT

    def at(value: float) -> float:
        return LEFT + (min(max(value, low), high) - low) / (high - low) * (end - LEFT)

    first, last = (at(measure.bound), end) if measure.least else (LEFT, at(measure.bound))
    parts = [
        f'<rect class="good" x="{first:.1f}" y="{y - 9}" width="{max(last - first, 0):.1f}" height="18"/>',
        f'<line class="grid" x1="{LEFT}" x2="{end}" y1="{y}" y2="{y}"/>',
    ]
    if measure.claimed is not None:
        parts.append(f'<path class="paper" d="{_diamond(at(measure.claimed), y)}"/>')
    if math.isfinite(interval.mean):
        parts.append(
            f'<line class="bar {name}" x1="{at(interval.low):.1f}" x2="{at(interval.high):.1f}" y1="{y}" y2="{y}"/>'
        )
        parts.append(f'<circle class="{name}" cx="{at(interval.mean):.1f}" cy="{y}" r="5"/>')
    said = _short(interval.mean)
    if math.isfinite(interval.low) and math.isfinite(interval.high):
        said += f" [{_short(interval.low)}, {_short(interval.high)}]"
    parts.append(f'<text x="{end + 10}" y="{y + 4}">{said}</text>')
    return parts


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "?"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
    return f"{value:.{digits}f}".replace("-", "−")


def _style() -> str:
    def rules(which: int, ink: str, quiet: str, line: str, good: str) -> str:
        found = f"text{{fill:{quiet}}}.title,.name{{fill:{ink}}}.grid{{stroke:{line}}}.good{{fill:{good}}}"
        found += f".paper{{fill:none;stroke:{ink};stroke-width:1.5}}"
        pairs = zip(_CLASSES.values(), _COLOURS.values())
        return found + "".join(f".{name}{{fill:{shades[which]};stroke:{shades[which]}}}" for name, shades in pairs)

    fixed = (
        "text{font:11px system-ui,sans-serif}.title{font-size:14px;font-weight:600}"
        ".name{font-size:12px;font-weight:600}.bar{stroke-width:2.5}"
    )
    dark = rules(1, "#e6e9eb", "#a3acb2", "#3a4146", "#1d3327")
    light = rules(0, "#1b2023", "#566066", "#d9dee1", "#e2f1e8")
    return f"{fixed}{light}@media (prefers-color-scheme:dark){{{dark}}}"
