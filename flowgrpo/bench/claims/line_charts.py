"""Line charts as SVG: panels side by side under one title, readable on a light and on a dark page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 380, 240
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 34, 46
TITLE, ROW = 28, 18

_LIGHT = ("#1f6aa5", "#c2571a", "#2c8256", "#8a4fa8", "#a8323e", "#77701c", "#3d8f9e", "#6b6f76")
_DARK = ("#6db3e8", "#f0935a", "#63c694", "#c593e0", "#ee7d86", "#c9bf5b", "#74cbd9", "#a9aeb6")


@dataclass(frozen=True)
class Series:
    """A line; points without a value are left out.

    Attributes:
        label: the line's name in the legend. Lines with the same label look the same.
        x: places.
        y: values, one for each place.
        faint: whether the line is thin and not in the legend, such as the line of a single seed.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    faint: bool = False

    def points(self) -> list[tuple[float, float]]:
        """The points with a finite value."""
        return [(x, y) for x, y in zip(self.x, self.y) if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class Panel:
    """Axes with lines; the title names the vertical axis, and `x_label` the horizontal axis."""

    title: str
    x_label: str
    series: Sequence[Series]


def draw(title: str, panels: Sequence[Panel], height: int = HEIGHT) -> str:
    """The panels as an SVG document; each panel is `WIDTH` wide and `height` high, in pixels."""
    labels = list(dict.fromkeys(s.label for panel in panels for s in panel.series))
    # When the colours are used up, they come again with other dashes.
    colours = {label: f"c{k % len(_LIGHT)} d{k // len(_LIGHT)}" for k, label in enumerate(labels)}
    width = max(len(panels), 1) * WIDTH
    rows, legend = _legend(colours, width)
    parts = [f'<text class="title" x="12" y="20">{escape(title)}</text>']
    for k, panel in enumerate(panels):
        parts.append(f'<g transform="translate({k * WIDTH} {TITLE})">{_panel(panel, colours, height)}</g>')
    parts.append(f'<g transform="translate(0 {TITLE + height})">{legend}</g>')
    whole = TITLE + height + ROW * rows + 8
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" width="{width}" height="{whole}"'
    return f'<svg {head} role="img">\n<style>{_style()}</style>\n' + "\n".join(parts) + "\n</svg>\n"


def _style() -> str:
    def rules(palette: Sequence[str], ink: str, quiet: str, line: str) -> str:
        found = [f"text{{fill:{quiet}}}.title,.name{{fill:{ink}}}.grid{{stroke:{line}}}"]
        found += [f".c{k}{{stroke:{colour}}}circle.c{k}{{fill:{colour}}}" for k, colour in enumerate(palette)]
        return "".join(found)

    fixed = (
        "text{font:11px system-ui,sans-serif}.title{font-size:14px;font-weight:600}.name{font-size:12px}"
        ".line{fill:none;stroke-width:2}.faint{fill:none;stroke-width:1;opacity:.35}"
        ".d1{stroke-dasharray:6 3}.d2{stroke-dasharray:2 2}"
    )
    dark = rules(_DARK, "#e6e9eb", "#a3acb2", "#3a4146")
    return f"{fixed}{rules(_LIGHT, '#1b2023', '#566066', '#d9dee1')}@media (prefers-color-scheme:dark){{{dark}}}"


def _legend(colours: dict[str, str], width: int) -> tuple[int, str]:
    parts, x, row = [], 14.0, 0
    for label, colour in colours.items():
        wide = 34 + 6.2 * len(label)
        if x + wide > width and x > 14:
            x, row = 14.0, row + 1
        y = ROW * row + 9
        parts.append(f'<line class="line {colour}" x1="{x:.0f}" x2="{x + 16:.0f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{x + 21:.0f}" y="{y + 4}">{escape(label)}</text>')
        x += wide
    return row + 1, "".join(parts)


def _panel(panel: Panel, colours: dict[str, str], height: int) -> str:
    points = [point for series in panel.series for point in series.points()]
    parts = [f'<text class="name" x="{LEFT}" y="18">{escape(panel.title)}</text>']
    if not points:
        return "".join([*parts, f'<text x="{LEFT}" y="{height / 2}">nothing measured</text>'])
    left, right = _range(x for x, _ in points)
    low, high = _range((y for _, y in points), margin=0.06)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (high - y) / (high - low) * (height - TOP - BOTTOM)

    for value, text in ticks(low, high):
        y = place(left, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in ticks(left, right):
        x, y = place(value, low)
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle">{escape(panel.x_label)}</text>')
    for series in panel.series:
        colour = colours[series.label]
        placed = [place(x, y) for x, y in series.points()]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="{"faint" if series.faint else "line"} {colour}" points="{line}"/>')
        if not series.faint and len(placed) <= 12:
            parts += [f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed]
    return "".join(parts)


def _range(values: Iterable[float], margin: float = 0.0) -> tuple[float, float]:
    found = list(values)
    low, high = min(found), max(found)
    if high == low:
        pad = 0.1 * abs(high) or 1.0
        return low - pad, high + pad
    return low - margin * (high - low), high + margin * (high - low)


def ticks(low: float, high: float, about: int = 5) -> list[tuple[float, str]]:
    """Round values between two ends, with their texts; the step is 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= 0.75 * raw)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    values = [step * k + 0.0 for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    largest = max(abs(low), abs(high))
    if 1e5 <= largest < 1e7 and step >= 1000:
        texts = [f"{v / 1000:.0f}k" if v else "0" for v in values]
    else:
        texts = [f"{v:.3g}" if largest >= 1e5 or step < 1e-4 else f"{v:.{digits}f}" for v in values]
    return [(v, text.replace("-", "−")) for v, text in zip(values, texts)]
