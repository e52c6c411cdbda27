"""Drawings of a plan: the rollout tree of one prompt, as text for a terminal and as an SVG picture.

No second code computes the tree. The executor runs the plan on states of one number with a velocity of zero, and the
drawing shows the tree that the executor recorded.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .plans import Plan
from .rollout import RolloutRunner
from .solvers import called


@dataclass(frozen=True)
class Node:
    """A state of the tree, and the edge that leads to it.

    Attributes:
        parent: index of the parent state; -1 for an initial noise.
        start: denoising step of the edge, which is the level of the parent; -1 for an initial noise.
        level: level of the state, as an index into the noise levels.
        line: `main` for the main line; `side` for the first step of a side branch; `finish` for the deterministic rest
            of a side branch; `probe` for a branch without noise.
        kernel: kernel of the edge; `ode` if no noise is added.
        std: standard deviation of the edge; 0 for a deterministic edge.
        trained: whether the edge enters the loss.
        leaf: whether the state is an image.
    """

    parent: int
    start: int
    level: int
    line: str
    kernel: str
    std: float
    trained: bool
    leaf: bool


@dataclass(frozen=True)
class PlanTree:
    """A plan, unfolded for one prompt.

    Attributes:
        plan: the plan.
        nodes: the initial noises first. Parents come before children, and the main line comes before its side branches.
    """

    plan: Plan
    nodes: tuple[Node, ...]

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node; children on the main line come first."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for k, node in enumerate(self.nodes):
            if node.parent >= 0:
                found[node.parent].append(k)
        return tuple(map(tuple, found))

    @cached_property
    def evaluations(self) -> tuple[int, ...]:
        """Number of states on which the denoiser is called, by denoising step."""
        calls = Counter(node.level for node in self.nodes)
        return tuple(calls[i] for i in range(self.plan.num_steps))

    def leaving(self, line: str) -> list[Node | None]:
        """For each denoising step, an edge from the main line onto this line; None if there is no such edge."""
        first: dict[int, Node] = {}
        for node in self.nodes:
            if node.line == line and node.parent >= 0 and self.nodes[node.parent].line == "main":
                first.setdefault(node.start, node)
        return [first.get(i) for i in range(self.plan.num_steps)]


def unfold(plan: Plan) -> PlanTree:
    """The tree of one prompt, as the executor walks it; this needs no model."""
    rollout = RolloutRunner(lambda x, i, prompts: torch.zeros_like(x), plan, (1,)).run((0,))
    trained = {node for t in rollout.transitions for node in t.node.tolist()}
    leaves = set(rollout.leaf.tolist())
    parents, levels, branches = rollout.parent.tolist(), rollout.depth.tolist(), rollout.branch.tolist()
    nodes: list[Node] = []
    for k, (parent, level, branch) in enumerate(zip(parents, levels, branches)):
        start, line, kernel, std = -1, "main", "ode", 0.0
        if parent >= 0:
            start, above = levels[parent], nodes[parent].line
            planned, (main, side) = plan.steps[start], plan.coefficients(start)
            if branch == 0:
                kernel, std = planned.kernel.name, main.std
            elif above != "main":
                line = "probe" if above == "probe" else "finish"
            elif planned.side_kernel is not None and side is not None:
                line, kernel, std = "side" if side.std > 0.0 else "probe", planned.side_kernel.name, side.std
        nodes.append(Node(parent, start, level, line, kernel if std else "ode", std, k in trained, k in leaves))
    return PlanTree(plan, tuple(nodes))


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def summary(plan: Plan) -> str:
    """The cost of one prompt, in one line."""
    counts = plan.counts()
    return (
        f"one prompt: {_plural(plan.roots, 'noise')} → {_plural(counts.leaves, 'image')}, {counts.evaluations} "
        f"evaluations ({counts.chain_evaluations} as chains), {_plural(counts.edges, 'edge')}, "
        f"{counts.trained_edges} of them trained"
    )


def kernel_runs(tree: PlanTree, line: str) -> list[tuple[int, int, str]]:
    """Runs of steps whose edges on a line are of one kind: (first, last, kernel and noise level, or solver)."""
    runs: list[tuple[int, int, str]] = []
    for i, edge in enumerate(tree.leaving(line)):
        if edge is None:
            continue
        step = tree.plan.steps[i]
        kernel = step.side_kernel if line == "side" else step.kernel
        if edge.std == 0.0 or kernel is None:
            what = "ode" if step.solver == "euler" else f"ode {called(step.solver)}"
        else:
            what = kernel.name if kernel.eta is None else f"{kernel.name} {kernel.eta:g}"
        if runs and runs[-1][1:] == (i - 1, what):
            runs[-1] = (runs[-1][0], i, what)
        else:
            runs.append((i, i, what))
    return runs


# As text.

_GUTTER, _WIDTH = 13, 100
_MEANING = {
    "━": "trained", "╍": "trained, deterministic", "─": "stochastic, not trained", "╌": "deterministic",
    "┈": "probe", "○": "noise", "●": "state", "◆": "images", "◇": "images of probes",
}  # fmt: skip


def draw_text(tree: PlanTree, title: str, note: str = "") -> str:
    """The tree for a terminal: equal siblings are drawn once, with their number.

    The drawing is 100 columns wide for 10 steps, and 120 columns for 25 steps.
    """
    plan, folded = tree.plan, _fold(tree)
    numbers = [f"×{count}" for kids in folded.values() for _, count in kids] + [str(n) for n in tree.evaluations]
    cell = max(4, 1 + max(map(len, numbers)), min(8, (_WIDTH - _GUTTER - 3) // plan.num_steps))

    def row(name: str, values: Iterable[str], last: str = "") -> str:
        return f"{name:<{_GUTTER}}" + "".join(value.center(cell) for value in values) + last

    levels = "".join(_short(sigma, cell).ljust(cell) for sigma in plan.sigmas[:-1])
    lines = [
        title,
        summary(plan),
        *([note] if note else []),
        "",
        row("step", map(str, range(plan.num_steps))),
        f"{'sigma':<{_GUTTER}}{levels}0",
    ]
    for name, line in (("std", "main"), ("side std", "side")):
        stds = [edge.std if edge else 0.0 for edge in tree.leaving(line)]
        if any(stds):
            lines.append(row(name, (_short(std, cell) if std else "·" for std in stds)))
    lines += [row("evaluations", map(str, tree.evaluations), f"= {sum(tree.evaluations)}"), ""]
    gutters = itertools.chain([_plural(plan.roots, "noise")], itertools.repeat(""))
    lines += [f"{gutter:<{_GUTTER}}{text}" for gutter, text in zip(gutters, _text_rows(tree, folded, cell))]
    lines.append("")
    for name, line in (("main line", "main"), ("branches", "side"), ("probes", "probe")):
        runs = kernel_runs(tree, line)
        lines += _paragraph(name, [f"{steps_text(first, last)} {what}" for first, last, what in runs], "; ")
    seen = {_mark(node) for node in tree.nodes} | {_stroke(node) for node in tree.nodes if node.parent >= 0}
    key = [f"{glyph if glyph in '○●◆◇' else 2 * glyph} {what}" for glyph, what in _MEANING.items() if glyph in seen]
    lines += _paragraph("key", [*key, "×n n from each state"], "  ")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _short(value: float, cell: int) -> str:
    """A sigma or std as text that is shorter than a cell."""
    if cell > 5:
        return f"{value:.3f}"
    return f"{value:.2f}".removeprefix("0") if value < 0.995 else f"{value:.1f}"


def steps_text(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}–{last}"


def _paragraph(name: str, entries: Sequence[str], between: str) -> list[str]:
    """A name and its entries, in lines that fit; no entry is split."""
    lines: list[str] = []
    for entry in entries:
        if lines and len(lines[-1]) + len(between) + len(entry) <= _WIDTH:
            lines[-1] += between + entry
        else:
            lines.append(f"{'' if lines else name:<{_GUTTER}}{entry}")
    return lines


def _fold(tree: PlanTree) -> dict[int, list[tuple[int, int]]]:
    """One node for all nodes whose edge and subtree are equal: node → [(child, how often)]."""
    known: dict[tuple[Node, tuple[tuple[int, int], ...]], int] = {}
    folded: dict[int, list[tuple[int, int]]] = {}
    one_of = [0] * len(tree.nodes)
    for k in reversed(range(len(tree.nodes))):
        kids = tuple(Counter(one_of[child] for child in tree.children[k]).items())
        one_of[k] = known.setdefault((replace(tree.nodes[k], parent=0), kids), k)
        folded.setdefault(one_of[k], list(kids))
    return folded


def _text_rows(tree: PlanTree, folded: dict[int, list[tuple[int, int]]], cell: int) -> list[str]:
    """The folded tree, a row for each kind of path. Later branches are nearer to their line, so that none cross."""
    rows: list[list[str]] = [[]]
    root = next(k for k in folded if tree.nodes[k].parent < 0)
    # Each entry: node, number of equal siblings, number of equal nodes in the tree, row of the parent, whether the node
    # goes on in the parent's row.
    todo = [(root, 1, tree.plan.roots, 0, True)]
    while todo:
        k, count, total, row, same = todo.pop()
        node = tree.nodes[k]
        if not same:
            corner = node.start * cell
            for between in rows[row + 1 :]:
                between[corner] = {"└": "├", "┕": "┝"}.get(between[corner], "│")
            row = len(rows)
            rows.append([*" " * corner, "┕" if node.trained else "└"])
        if node.parent >= 0:
            edge = _stroke(node) * ((node.level - node.start) * cell - 1)
            label = f"×{count}" if count > 1 else ""
            left = min(2, cell - 1 - len(label))
            rows[row] += edge[:left] + label + edge[left + len(label) :]
        rows[row] += _mark(node) + (f" {total}" if node.leaf else "")
        todo += reversed([(child, n, total * n, row, j == 0) for j, (child, n) in enumerate(folded[k])])
    return ["".join(row) for row in rows]


def _stroke(node: Node) -> str:
    if node.trained:
        return "━" if node.std else "╍"
    if node.line == "probe":
        return "┈"
    return "─" if node.std else "╌"


def _mark(node: Node) -> str:
    if node.leaf:
        return "◇" if node.line == "probe" else "◆"
    return "●" if node.parent >= 0 else "○"
