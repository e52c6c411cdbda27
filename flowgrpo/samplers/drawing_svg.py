"""The picture of a rollout tree: `drawing.PlanTree` as SVG."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

from .drawing import Node, PlanTree, kernel_runs, steps_text, summary
from .solvers import called

SVG_LEAVES = 400
"""Largest number of leaves in an SVG."""

_STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1b2023; }
.ground { fill: #ffffff; } .title { font-size: 19px; font-weight: 650; } .strong { font-weight: 650; }
.quiet { fill: #5c666c; } .middle { text-anchor: middle; }
.band { fill: #eef1f2; } .lit { fill: #fdf2ec; } .bar { fill: #c3cbd0; }
.level { stroke: #1b2023; stroke-opacity: 0.09; }
.edge { fill: none; stroke: #8d989e; } .noisy { stroke: #33678f; }
.ode { stroke-dasharray: 5 3; } .probe { stroke: #0b7363; stroke-dasharray: 1.5 3; stroke-linecap: round; }
.trained { stroke: #cc4a12; }
.state { fill: #5c666c; } .noise { fill: #ffffff; stroke: #5c666c; stroke-width: 1.8; }
.image { fill: #33678f; } .probed { fill: #ffffff; stroke: #0b7363; stroke-width: 1.4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e8e9; } .ground, .noise, .probed { fill: #16191b; } .quiet { fill: #98a3a9; }
  .band { fill: #262b2f; } .lit { fill: #2b211c; } .level { stroke: #ffffff; } .bar { fill: #525c62; }
  .edge { stroke: #7b868c; } .noisy { stroke: #7db4dd; } .probe, .probed { stroke: #56c5ae; }
  .trained { stroke: #f5854a; } .state { fill: #98a3a9; } .noise { stroke: #98a3a9; } .image { fill: #7db4dd; }
}
"""
_LEFT, _RIGHT, _ROWS, _LETTER = 118.0, 40.0, 88.0, 6.4
_EDGES = {
    "trained": ("trained", 2.8), "trained ode": ("trained, deterministic", 2.8),
    "noisy": ("stochastic, not trained", 1.6), "ode": ("deterministic", 1.4), "probe": ("probe, without noise", 1.6),
}  # fmt: skip
_STATES = {"noise": "noise", "state": "state, evaluated once", "image": "image", "probed": "image of a probe"}


def draw_svg(tree: PlanTree, title: str, note: str = "") -> str:
    """The tree as a self-contained picture that shows every state; noises beyond `SVG_LEAVES` leaves are left out.

    Raises:
        ValueError: if a single noise has more leaves than `SVG_LEAVES`.
    """
    roots, leaves = tree.plan.roots, sum(node.leaf for node in tree.nodes)
    drawn = min(roots, SVG_LEAVES * roots // leaves)
    if not drawn:
        raise ValueError(
            f"one noise leads to {leaves // roots} images, and an SVG holds {SVG_LEAVES}; draw the plan as text, "
            "which shows equal branches once"
        )
    left_out = f"{drawn} of {roots} noises drawn" if drawn < roots else ""
    return _Picture(tree, drawn).draw(title, "; ".join(filter(None, [summary(tree.plan), left_out, note])))


def _heights(tree: PlanTree, roots: int) -> dict[int, float]:
    """Height of every node below the first `roots` noises, in leaves from the top; a line without splits is level."""
    heights: dict[int, float] = {}
    order: list[int] = []
    todo, leaves = list(reversed(range(roots))), itertools.count()
    while todo:
        k = todo.pop()
        order.append(k)
        if tree.nodes[k].leaf:
            heights[k] = float(next(leaves))
        todo += reversed(tree.children[k])
    for k in reversed(order):
        kids = [child for child in tree.children[k] if tree.nodes[child].line == "main"] or tree.children[k]
        if kids:
            heights[k] = sum(heights[child] for child in kids) / len(kids)
    return heights


def _edge_style(node: Node) -> str:
    if node.trained:
        return "trained" if node.std else "trained ode"
    return "probe" if node.line == "probe" else "noisy" if node.std else "ode"


def _state_style(node: Node) -> str:
    if node.leaf:
        return "probed" if node.line == "probe" else "image"
    return "state" if node.parent >= 0 else "noise"


def _band_height(tree: PlanTree, line: str) -> float:
    return 48.0 if any(edge and edge.std for edge in tree.leaving(line)) else 30.0


class _Picture:
    """An SVG of the first `roots` noises: its geometry, and its parts from top to bottom."""

    def __init__(self, tree: PlanTree, roots: int) -> None:
        self.tree, self.plan = tree, tree.plan
        heights = _heights(tree, roots)
        leaves = sum(tree.nodes[k].leaf for k in heights)
        gap = max(5.0, min(26.0, 620.0 / leaves))
        self.scale = max(0.5, min(1.0, gap / 12.0))
        self.column = min(110.0, max(60.0, 980.0 / self.plan.num_steps))
        self.bands = [line for line in ("main", "side", "probe") if any(tree.leaving(line))]
        self.top = _ROWS + 48.0 + sum(_band_height(tree, line) for line in self.bands)
        self.bottom = self.top + gap * (leaves - 1)
        self.nodes = {k: tree.nodes[k] for k in sorted(heights)}
        self.y = {k: self.top + gap * height for k, height in heights.items()}
        self.width = self.x(self.plan.num_steps) + _RIGHT
        self.svg = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")

    def x(self, level: float) -> float:
        return _LEFT + self.column * level

    def draw(self, title: str, subtitle: str) -> str:
        title, subtitle = ("".join(c if c.isprintable() else " " for c in text) for text in (title, subtitle))
        self.width = max(self.width, 48.0 + 1.7 * _LETTER * len(title), 48.0 + _LETTER * len(subtitle))
        ET.SubElement(self.svg, "title").text = title
        ET.SubElement(self.svg, "style").text = _STYLE
        self.shape("rect", "ground", width="100%", height="100%")
        self.write(24, 36, title, "title")
        self.write(24, 58, subtitle, "quiet")
        self.table()
        self.edges()
        self.states()
        self.evaluations(self.bottom + 30.0)
        width, height = math.ceil(self.width), math.ceil(self.key(self.bottom + 124.0))
        for name, value in (("viewBox", f"0 0 {width} {height}"), ("width", width), ("height", height)):
            self.svg.set(name, str(value))
        ET.indent(self.svg, "")
        return ET.tostring(self.svg, encoding="unicode") + "\n"

    def shape(self, tag: str, style: str, into: ET.Element | None = None, **attributes: float | str) -> ET.Element:
        given = {k: v if isinstance(v, str) else f"{v:.1f}".removesuffix(".0") for k, v in attributes.items()}
        return ET.SubElement(self.svg if into is None else into, tag, {**({"class": style} if style else {}), **given})

    def write(self, x: float, y: float, text: str, style: str = "") -> None:
        if text:
            self.shape("text", style, x=x, y=y).text = text

    def table(self) -> None:
        """Columns of trained steps, the step numbers, the kernels and stds of each line, and below them the sigmas."""
        y, end = _ROWS, self.bottom + 16.0
        for i in self.plan.trained_steps:
            self.shape("rect", "lit", x=self.x(i), y=y - 16, width=self.column, height=end - y + 16)
        self.write(24, y, "step", "quiet")
        for i in range(self.plan.num_steps):
            self.write(self.x(i + 0.5), y, str(i), "middle strong" if i in self.plan.trained_steps else "middle")
        for line in self.bands:
            self.write(24, y + 26, {"main": "main line", "side": "branches", "probe": "probes"}[line], "quiet")
            for first, last, what in kernel_runs(self.tree, line):
                wide = self.x(last + 1) - self.x(first) - 6
                band = self.shape("rect", "band", x=self.x(first) + 3, y=y + 11, width=wide, height=22.0, rx=5.0)
                ET.SubElement(band, "title").text = f"{steps_text(first, last)}: {what}"
                short = what if _LETTER * len(what) < wide else what.split()[0]
                self.write(self.x((first + last + 1) / 2), y + 26, short, "middle")
            stds = [edge.std if edge else 0.0 for edge in self.tree.leaving(line)]
            self.write(24, y + 48, "std" if any(stds) else "", "quiet")
            for i, std in enumerate(stds):
                self.write(self.x(i + 0.5), y + 48, f"{std:.3f}" if std else "", "middle")
            y += _band_height(self.tree, line)
        y += 28.0
        self.write(24, y, "σ", "quiet")
        for level, sigma in enumerate(self.plan.sigmas):
            self.write(self.x(level), y, f"{sigma:.3f}" if sigma else "0", "middle")
            self.shape("line", "level", x1=self.x(level), x2=self.x(level), y1=y + 7, y2=end)

    def edges(self) -> None:
        for style, (_, width) in reversed(_EDGES.items()):
            group = ET.Element("g", {"class": f"edge {style}", "stroke-width": f"{width * self.scale:.2f}"})
            for k, node in self.nodes.items():
                if node.parent >= 0 and _edge_style(node) == style:
                    self.edge(group, k, node)
            if len(group):
                self.svg.append(group)

    def edge(self, group: ET.Element, k: int, node: Node) -> None:
        x, bend, y, end = self.x(node.start), self.x(node.start + 0.5), self.y[node.parent], self.y[k]
        curve = f"C{bend:.1f} {y:.1f} {bend:.1f} {end:.1f} {self.x(node.start + 1):.1f} {end:.1f}" if end != y else ""
        path = self.shape("path", "", group, d=f"M{x:.1f} {y:.1f}{curve}H{self.x(node.level):.1f}")
        sigma, sigma_next = self.plan.sigmas[node.start], self.plan.sigmas[node.level]
        solver = called(self.plan.steps[node.start].solver)
        how = f"{node.kernel}, std {node.std:.4g}" if node.std else f"ode, {solver}, deterministic"
        about = f"step {node.start}, σ {sigma:.4g} → {sigma_next:.4g}: {how}"
        ET.SubElement(path, "title").text = about + (", trained" if node.trained else "")

    def states(self) -> None:
        number = {k: j for j, k in enumerate(k for k, node in enumerate(self.tree.nodes) if node.leaf)}
        for k, node in self.nodes.items():
            level = node.level
            about = f"image {number[k]}" if node.leaf else f"σ {self.plan.sigmas[level]:.4g}, before step {level}"
            mark = self.mark(_state_style(node), self.x(node.level), self.y[k], self.scale)
            ET.SubElement(mark, "title").text = about

    def mark(self, style: str, x: float, y: float, scale: float = 1.0) -> ET.Element:
        if style in ("image", "probed"):
            side = 8.4 * scale
            return self.shape("rect", style, x=x - side / 2, y=y - side / 2, width=side, height=side, rx=1.6 * scale)
        return self.shape("circle", style, cx=x, cy=y, r=(5.0 if style == "noise" else 2.9) * scale)

    def evaluations(self, y: float) -> None:
        """A bar for each step: the number of calls of the denoiser."""
        calls = self.tree.evaluations
        base, wide = y + 54.0, min(24.0, 0.4 * self.column)
        self.write(24, base - 20, "evaluations", "quiet")
        self.write(24, base - 3, f"{sum(calls)} in all", "strong")
        for i, count in enumerate(calls):
            tall = max(1.0, 36.0 * count / max(calls))
            self.shape("rect", "bar", x=self.x(i + 0.5) - wide / 2, y=base - tall, width=wide, height=tall, rx=2.0)
            self.write(self.x(i + 0.5), base - tall - 6, str(count), "middle")

    def key(self, y: float) -> float:
        """Draw the key of all strokes and marks that occur, and return the height of the picture."""
        edges = {_edge_style(node) for node in self.nodes.values() if node.parent >= 0}
        marks = {_state_style(node) for node in self.nodes.values()}
        entries = [(style, meaning) for style, (meaning, _) in _EDGES.items() if style in edges]
        entries += [(style, meaning) for style, meaning in _STATES.items() if style in marks]
        x = 24.0
        for style, meaning in entries:
            room = (42.0 if style in _EDGES else 20.0) + _LETTER * len(meaning) + 18.0
            if x > 24.0 and x + room > self.width:
                x, y = 24.0, y + 22.0
            if style in _EDGES:
                self.shape("path", f"edge {style}", d=f"M{x:.1f} {y - 4:.1f}h32").set(
                    "stroke-width", f"{_EDGES[style][1]}"
                )
                self.write(x + 42, y, meaning, "quiet")
            else:
                self.mark(style, x + 6, y - 4)
                self.write(x + 20, y, meaning, "quiet")
            x += room
        return y + 24.0
