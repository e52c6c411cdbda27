"""The drawn tree against a real rollout and the plan's own counts, and the drawings against the tree."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from flowgrpo.samplers.drawing import PlanTree, draw_text, summary, unfold
from flowgrpo.samplers.drawing_svg import SVG_LEAVES, draw_svg
from flowgrpo.samplers.kernels import Kernel
from flowgrpo.samplers.plans import ODE, Plan, StepPlan, branch_plan, ode_plan, spine_plan, window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.schedules import shifted_sigmas
from tests.samplers.test_rollout import plans

TEN = shifted_sigmas(10, 3.0)
FLOW, DANCE = Kernel("flow_sde", 0.7), Kernel("dance_sde", 0.4)
PLANS = {
    "window": window_plan(TEN, (2, 3), FLOW, samples=12, solver="dpmpp_2m"),
    "chains": window_plan(shifted_sigmas(25), range(24), FLOW, samples=24, shared_noise=False),
    "probed": window_plan(TEN, (1, 2, 3), FLOW, samples=6, probe=1),
    "valued": window_plan(TEN, range(9), Kernel("cps", 0.6), samples=24, probe=0),
    "branch": branch_plan(shifted_sigmas(20, 3.0), (0, 3, 6, 9), DANCE, width=2),
    "mixed": branch_plan(TEN, (1, 4), DANCE, width=3, stochastic=(1, 2, 4), roots=2),
    "spine": spine_plan(TEN, range(9), FLOW, branches=6),
    "granular": spine_plan(TEN, (0, 1, 2), FLOW, branches=4, roots=2, main_leaf=True, completions=(1, 2, 0)),
    "neighbours": ode_plan(TEN, samples=6, trained=range(4), spread=0.3),
}
everything = pytest.mark.parametrize("name", PLANS)


class Model:
    """A velocity that is not zero, and counts the states of each step."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()

    def __call__(self, x: Tensor, i: int, prompts: Sequence[int]) -> Tensor:
        self.calls[i] += len(x)
        return 0.3 * x + torch.tensor(prompts).reshape(-1, 1, 1)


def check_tree(tree: PlanTree) -> None:
    plan, counts, model = tree.plan, tree.plan.counts(), Model()
    rollout = RolloutRunner(model, plan, (2, 3), batch=5).run((7, 8, 9))
    trained = {node for t in rollout.transitions for node in t.node.tolist()}
    leaves = set(rollout.leaf.tolist())

    for p in range(3):
        nodes = (rollout.prompt == p).nonzero()[:, 0].tolist()
        place = {node: k for k, node in enumerate(nodes)} | {-1: -1}
        assert [node.parent for node in tree.nodes] == [place[rollout.parent[k].item()] for k in nodes]
        assert [node.level for node in tree.nodes] == rollout.depth[nodes].tolist()
        assert [node.line != "main" for node in tree.nodes] == (rollout.branch[nodes] > 0).tolist()
        assert [node.std > 0 for node in tree.nodes] == (rollout.log_prob[nodes] != 0).tolist()
        assert [node.trained for node in tree.nodes] == [k in trained for k in nodes]
        assert [node.leaf for node in tree.nodes] == [k in leaves for k in nodes]
    inner = [node for node in tree.nodes if node.parent >= 0]
    assert [node.start for node in inner] == [tree.nodes[node.parent].level for node in inner]
    assert all(node.start == -1 and node.line == "main" for node in tree.nodes[: plan.roots])
    assert len(inner) == counts.edges == len(tree.nodes) - plan.roots
    assert sum(node.leaf for node in tree.nodes) == counts.leaves
    assert sum(node.trained for node in tree.nodes) == counts.trained_edges
    assert sum(tree.evaluations) == counts.evaluations
    assert tree.evaluations == tuple(model.calls[i] / 3 for i in range(plan.num_steps))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans())
def test_the_tree_is_the_one_a_rollout_walks(plan: Plan) -> None:
    check_tree(unfold(plan))


@everything
def test_the_tree_of_each_method_is_the_one_a_rollout_walks(name: str) -> None:
    check_tree(unfold(PLANS[name]))


def test_edges_carry_their_own_kernel() -> None:
    kernels = (ODE, FLOW, Kernel("cps", 0.5), Kernel("cps", 0.5))
    steps = [
        StepPlan(kernel=kernel, side=1, side_kernel=side) for kernel, side in zip(kernels, (DANCE, ODE, FLOW, ODE))
    ]
    plan = Plan(shifted_sigmas(4), tuple(steps))
    tree = unfold(plan)

    main, side, probe = (tree.leaving(line) for line in ("main", "side", "probe"))
    # The step of cps to 0 adds no noise.
    assert [node.kernel for node in main if node] == ["ode", "flow_sde", "cps", "ode"]
    assert [node and node.kernel for node in side] == ["dance_sde", None, "flow_sde", None]
    assert [node and node.kernel for node in probe] == [None, "ode", None, "ode"]
    assert [node.std for node in main if node] == [plan.coefficients(i)[0].std for i in range(4)]
    assert [node.line for node in tree.nodes if node.line not in ("main", "probe")].count("finish") == 3 + 1


def body(text: str) -> list[str]:
    """The rows of the tree itself, without their names."""
    return [line[13:] for line in text.split("\n\n")[-2].splitlines()]


def check_text(tree: PlanTree) -> None:
    text, counts = draw_text(tree, "a title"), tree.plan.counts()
    rows = body(text)
    header = {line[:13].strip(): line[13:].split() for line in text.splitlines() if len(line) > 13}

    assert text.startswith("a title\none prompt: ")
    assert text.endswith("\n")
    assert header["step"] == [str(i) for i in range(tree.plan.num_steps)]
    assert header["evaluations"] == [*map(str, tree.evaluations), "=", str(counts.evaluations)]
    # The leaves of a row are written at its end; the last column is equal for all rows.
    ends = [re.search("[◆◇] ([0-9]+)$", row) for row in rows]
    assert sum(int(end[1]) for end in ends if end) == counts.leaves
    assert len({end.start() if end else -1 for end in ends}) == 1
    # A branch hangs from a state above it, and nothing crosses the way up.
    for k, row in enumerate(rows[1:], 1):
        (corner,) = [x for x, glyph in enumerate(row) if glyph in "└├┕┝"]
        above = [rows[j][corner] for j in reversed(range(k))]
        assert next(glyph for glyph in above if glyph not in "│├┝") in "●○"
    drawn = "".join(rows)
    assert any(glyph in drawn for glyph in "━╍┕┝") == (counts.trained_edges > 0)
    assert ("◇" in drawn) == any(node.line == "probe" for node in tree.nodes)
    for glyph in "━╍─╌┈○●◆◇":
        assert (glyph in drawn) == (glyph in text.splitlines()[-1] + text.splitlines()[-2])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans())
def test_text_shows_every_leaf_once_and_crosses_nothing(plan: Plan) -> None:
    check_text(unfold(plan))


@everything
def test_text_fits_the_terminal(name: str) -> None:
    tree = unfold(PLANS[name])
    check_text(tree)

    lines = draw_text(tree, "").splitlines()
    assert max(map(len, lines)) <= (100 if tree.plan.num_steps <= 20 else 120)
    assert len(body("\n".join(lines))) <= 10


def test_a_text_by_hand() -> None:
    plan = spine_plan((1.0, 0.75, 0.5, 0.0), (0, 1), Kernel("dance_sde", 0.5), branches=3, roots=2, completions=(1, 0))
    lines = draw_text(unfold(plan), "two").splitlines()

    assert lines == [
        "two",
        "one prompt: 2 noises → 24 images, 22 evaluations (66 as chains), 44 edges, 12 of them trained",
        "",
        "step            0       1       2",
        "sigma        1.000   0.750   0.500   0",
        "side std      0.250   0.250     ·",
        "evaluations     2       8       12   = 22",
        "",
        "2 noises     ○╌╌╌╌╌╌╌●━━×3━━━●╌╌×2╌╌╌◆ 12",
        "             ┕━━×3━━━●╌╌╌╌╌╌╌●╌╌╌╌╌╌╌◆ 6",
        "                     └╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌◆ 6",
        "",
        "main line    step 0 ode",
        "branches     steps 0–1 dance_sde 0.5",
        "key          ━━ trained  ╌╌ deterministic  ○ noise  ● state  ◆ images  ×n n from each state",
    ]


def test_steps_that_are_alike_but_apart_are_named_apart() -> None:
    steps = [StepPlan(side=1, side_kernel=DANCE) if i in (0, 1, 3) else StepPlan() for i in range(5)]
    text = draw_text(unfold(Plan(shifted_sigmas(5), tuple(steps))), "")

    assert "\nmain line    steps 0–4 ode\nbranches     steps 0–1 dance_sde 0.4; step 3 dance_sde 0.4\n" in text


NAMESPACE = "{http://www.w3.org/2000/svg}"


def places(mark: ET.Element) -> tuple[float, float]:
    if mark.tag == f"{NAMESPACE}circle":
        return float(mark.attrib["cx"]), float(mark.attrib["cy"])
    side = float(mark.attrib["width"]) / 2
    return float(mark.attrib["x"]) + side, float(mark.attrib["y"]) + side


def check_svg(tree: PlanTree, roots: int) -> None:
    picture = ET.fromstring(draw_svg(tree, "a title"))
    counts, all_roots = tree.plan.counts(), tree.plan.roots
    groups = {group.attrib["class"].removeprefix("edge "): list(group) for group in picture.iter(f"{NAMESPACE}g")}
    paths = [path for group in groups.values() for path in group]
    marks = [e for e in picture if len(e) and e.attrib.get("class") in ("noise", "state", "image", "probed")]
    labels = ["".join(text.itertext()) for text in picture.iter(f"{NAMESPACE}text")]

    left_out = f"; {roots} of {all_roots} noises drawn" if roots < all_roots else ""
    assert labels[:2] == ["a title", summary(tree.plan) + left_out]
    assert f"{counts.evaluations} in all" in labels
    assert len(paths) == counts.edges * roots // all_roots
    assert (
        sum(len(group) for style, group in groups.items() if "trained" in style)
        == counts.trained_edges * roots // all_roots
    )
    stochastic = sum(node.std > 0 for node in tree.nodes)
    assert sum(len(groups.get(style, ())) for style in ("trained", "noisy")) == stochastic * roots // all_roots
    assert len(marks) == len(tree.nodes) * roots // all_roots
    assert sum(mark.attrib["class"] in ("image", "probed") for mark in marks) == counts.leaves * roots // all_roots
    assert all(element.findtext(f"{NAMESPACE}title") for element in paths + marks)

    # No two states at one place; every edge leads from a state to one right of it, and none cross; all is within.
    where = [places(mark) for mark in marks]
    assert len({(round(x), round(y, 0)) for x, y in where}) == len(where)
    near = {(round(x + dx), round(y + dy)) for x, y in where for dx in (-0.5, 0, 0.5) for dy in (-0.5, 0, 0.5)}
    bends = []
    for path in paths:
        numbers = [float(n) for n in re.findall("[0-9.]+", path.attrib["d"])]
        start, end = numbers[:2], (numbers[-1], numbers[-2] if "C" in path.attrib["d"] else numbers[1])
        assert start[0] < end[0]
        assert (round(start[0]), round(start[1])) in near
        assert (round(end[0]), round(end[1])) in near
        bends.append((start, end))
    for left in {start[0] for start, _ in bends}:
        passing = sorted(
            (start[1] if start[0] == left else end[1], end[1]) for start, end in bends if start[0] <= left < end[0]
        )
        assert [end for _, end in passing] == sorted(end for _, end in passing)
    width, height = (float(picture.attrib[name]) for name in ("width", "height"))
    assert all(0 < x < width and 0 < y < height for x, y in where)
    assert picture.attrib["viewBox"] == f"0 0 {width:g} {height:g}"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(plans())
def test_svg_draws_every_state_and_edge(plan: Plan) -> None:
    check_svg(unfold(plan), plan.roots)


@everything
def test_svg_draws_each_method(name: str) -> None:
    check_svg(unfold(PLANS[name]), PLANS[name].roots)


def heights(name: str, style: str) -> list[float]:
    """The marks of one style, in the order of the tree."""
    picture = ET.fromstring(draw_svg(unfold(PLANS[name]), ""))
    return [places(mark)[1] for mark in picture if len(mark) and mark.attrib.get("class") == style]


def test_svg_counts_images_from_the_top_and_keeps_a_main_line_level() -> None:
    chains, images = heights("chains", "image"), heights("window", "image")
    assert chains == sorted(chains) == pytest.approx(heights("chains", "noise"), abs=0.2)
    assert images == sorted(images)
    (root,) = heights("window", "noise")
    assert root == pytest.approx((images[0] + images[-1]) / 2, abs=0.2)

    main = [node.line == "main" for node in unfold(PLANS["spine"]).nodes if node.parent >= 0 and not node.leaf]
    (root,) = heights("spine", "noise")
    assert [y for y, on_main in zip(heights("spine", "state"), main) if on_main] == [root] * 8


def test_svg_leaves_out_whole_noises_beyond_its_limit() -> None:
    plan = spine_plan(TEN, range(9), FLOW, branches=6, roots=9)
    check_svg(unfold(plan), SVG_LEAVES // 54)

    wide = window_plan(shifted_sigmas(2), (0,), FLOW, samples=SVG_LEAVES + 1)
    with pytest.raises(ValueError, match="one noise leads to 401 images, and an SVG holds 400; draw the plan as text"):
        draw_svg(unfold(wide), "")
    check_text(unfold(wide))


def test_svg_escapes_what_it_is_given() -> None:
    picture = ET.fromstring(draw_svg(unfold(PLANS["window"]), '<b> & "c" ]]> \x00\x1b', "x < y & z"))
    labels = ["".join(text.itertext()) for text in picture.iter(f"{NAMESPACE}text")]

    assert labels[0] == picture.findtext(f"{NAMESPACE}title") == '<b> & "c" ]]>   '
    assert labels[1].endswith("trained; x < y & z")


def test_svg_titles_say_what_an_edge_is() -> None:
    picture = ET.fromstring(draw_svg(unfold(PLANS["window"]), ""))
    titles = [title.text for path in picture.iter(f"{NAMESPACE}path") for title in path]
    std = PLANS["window"].coefficients(2)[0].std

    assert titles.count(f"step 2, σ {TEN[2]:.4g} → {TEN[3]:.4g}: flow_sde, std {std:.4g}, trained") == 12
    assert titles.count(f"step 0, σ 1 → {TEN[1]:.4g}: ode, dpmpp_2m, deterministic") == 1


def test_drawings_repeat() -> None:
    first, again = (unfold(PLANS["granular"]) for _ in range(2))

    assert first == again
    assert draw_text(first, "t") == draw_text(again, "t")
    assert draw_svg(first, "t") == draw_svg(again, "t")
