"""Plans: what a rollout does at every denoising step, before any model is called.

A rollout is a tree per prompt: the roots are noise, the leaves are images, and an edge is one denoising step. For each
step, a plan says which kernel moves the main line, how many children each state gets, and whether side branches leave
the main line. Side branches are finished deterministically. Chains (Flow-GRPO, MixGRPO), trees (BranchGRPO) and a main
line with branches at every step (TempFlow-GRPO) are plans; `rollout` walks any plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from .kernels import Coefficients, Kernel
from .plan_checks import check_shape, check_step, check_whole
from .schedules import check_sigmas
from .solvers import Solver

ODE = Kernel("ode")

Strides = tuple[int, ...]
"""How a side branch goes on: a stride for each of its completions, after minus the steps that it takes before them."""


@dataclass(frozen=True)
class StepPlan:
    """The plan of one denoising step, for every state of the main line.

    Attributes:
        kernel: kernel of the main line's own transition.
        children: number of main-line children of each state, each with its own noise; 1 for a deterministic kernel.
        side: number of children that leave the main line at this step and go on deterministically to a leaf.
        side_kernel: kernel of these side children. A single deterministic child is a probe: it shows the image that the
            state would become without further noise (TP-GRPO, 2602.06422).
        completions: strides with which a side branch is finished, once for each entry. 1 takes deterministic steps to
            every level, 2 to every second level, and so on (G²RPO, 2510.01982). 0 takes one step to the clean
            prediction (VGPO, 2512.12387). A stochastic branch first takes its own step; a probe skips levels from the
            start.
        lead: number of steps to the next level that a side branch takes before its strides begin. In the code of G²RPO
            it is 1.
        trained: whether the edges of this step are trained.
        solver: solver of the deterministic transitions of this step, on the main line and on side branches.
        spread: if given, the noise of a sibling is `(shared + spread · own) / √(1 + spread²)`. Its variance is 1, and
            the correlation of two siblings is `1 / (1 + spread²)` (BranchGRPO's branch noise, 2509.06040). None draws
            the noises independently.
    """

    kernel: Kernel = ODE
    children: int = 1
    side: int = 0
    side_kernel: Kernel | None = None
    completions: tuple[int, ...] = (1,)
    lead: int = 0
    trained: bool = False
    solver: str | Solver = "euler"
    spread: float | None = None

    @property
    def strides(self) -> Strides:
        """How a stochastic side branch goes on."""
        return (-self.lead, *self.completions) if self.lead else self.completions


def onward(strides: Strides) -> list[tuple[int, Strides]]:
    """The next moves of a side branch: the stride of each move, and how the branch goes on after it."""
    lead, *rest = strides
    if lead >= 0:
        return [(stride, (stride,)) for stride in strides]
    return [(1, (lead + 1, *rest) if lead < -1 else tuple(rest))]


@dataclass(frozen=True)
class PlanCounts:
    """The cost of a plan, per prompt.

    Attributes:
        evaluations: distinct states on which the denoiser is called.
        chain_evaluations: evaluations if every leaf had its own chain.
        leaves: number of decoded images, previews of intermediate states among them.
        images: number of images without previews.
        edges: transitions of the tree.
        walked: evaluations if each sample of a root walked from the noise by itself, and no two edges of the tree
            shared an evaluation. This is how the papers count the evaluations of the policy that samples.
        trained_edges: transitions that enter the loss.
        trained_states: distinct states whose velocity is computed again with gradients.
        trained_steps: denoising steps with a trained edge.
        stored_states: distinct states that a rollout stores: the starts and the ends of trained edges, and the leaves.
    """

    evaluations: int
    chain_evaluations: int
    leaves: int
    images: int
    edges: int
    walked: int
    trained_edges: int
    trained_states: int
    trained_steps: tuple[int, ...]
    stored_states: int


@dataclass(frozen=True)
class Plan:
    """A rollout per prompt: a table of noise levels, a `StepPlan` for each step, and how the leaves share noise.

    Attributes:
        sigmas: `T + 1` noise levels, decreasing to exactly 0.
        steps: `T` step plans.
        roots: distinct initial noises per prompt.
        samples: main-line copies of each root. The copies stay one state until the first stochastic step, where each
            copy gets its own noise. So samples that share their initial noise share the whole ODE prefix.
        main_leaf: whether the main line goes on past its last side branch and ends in a leaf.
        root_spread: like `StepPlan.spread`, but for the initial noises of a prompt (Neighbor GRPO's neighbours).
        neighbours: whether the trained edges are deterministic. An objective of choices gets their density from the
            other roots of the prompt.
        given: whether nothing is sampled, because the data give the images: `roots` of them for each prompt. The noise
            levels are the levels at which a loss of the forward process may noise the images.

    Raises:
        ValueError: if the geometry cannot run or cannot be trained. The message says what to write instead.
    """

    sigmas: tuple[float, ...]
    steps: tuple[StepPlan, ...]
    roots: int = 1
    samples: int = 1
    main_leaf: bool = True
    root_spread: float | None = None
    neighbours: bool = False
    given: bool = False
    _coefficients: tuple[tuple[Coefficients, Coefficients | None], ...] = field(
        init=False, repr=False, compare=False, default=()
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigmas", check_sigmas(self.sigmas))
        check_shape(self)
        object.__setattr__(self, "_coefficients", tuple(check_step(self, i) for i in range(len(self.steps))))
        check_whole(self)

    @property
    def num_steps(self) -> int:
        """Denoising steps `T`."""
        return len(self.steps)

    def coefficients(self, i: int) -> tuple[Coefficients, Coefficients | None]:
        """Transition of step `i` on the main line, and of its side branches."""
        return self._coefficients[i]

    @property
    def first_stochastic(self) -> int | None:
        """First stochastic step of the main line; None if it has no stochastic step."""
        stochastic = (i for i, (main, _) in enumerate(self._coefficients) if main.std > 0.0)
        return next((i for i in stochastic if not self.main_line_ends(i + 1)), None)

    def main_children(self, i: int) -> int:
        """Number of main-line children at step `i`, including the deferred copies of each root."""
        return self.steps[i].children * (self.samples if i == self.first_stochastic else 1)

    @property
    def main_states(self) -> tuple[int, ...]:
        """Number of states of the main line before each step, per prompt."""
        states = [self.roots]
        for i in range(self.num_steps - 1):
            states.append(states[-1] * self.main_children(i))
        return tuple(states)

    @property
    def trained_steps(self) -> tuple[int, ...]:
        """Steps with trained edges."""
        return tuple(i for i, step in enumerate(self.steps) if step.trained)

    def trained_coefficients(self, i: int) -> Coefficients:
        """The trained transition of step `i`: the side branches' if they are stochastic, else the main line's."""
        main, side = self._coefficients[i]
        return side if side is not None and side.std > 0.0 else main

    def trained_kernel(self, i: int) -> Kernel:
        """The kernel of the trained transition of step `i`."""
        step, side = self.steps[i], self._coefficients[i][1]
        return step.side_kernel if step.side_kernel is not None and side is not None and side.std > 0.0 else step.kernel

    def next_level(self, i: int, stride: int) -> int:
        """The level to which a side branch at level `i` goes, as an index into `sigmas`."""
        return min(i + stride, self.num_steps) if stride else self.num_steps

    def jumps(self) -> set[tuple[int, int]]:
        """The moves of side branches that skip levels, from one index into `sigmas` to another."""
        found: set[tuple[int, int]] = set()
        ways: list[tuple[int, Strides]] = []
        for i, (step, (_, side)) in enumerate(zip(self.steps, self._coefficients)):
            if side is not None:
                ways.append((i + 1, step.strides) if side.std > 0.0 else (i, step.completions))
        while ways:
            level, strides = ways.pop()
            for stride, after in onward(strides) if level < self.num_steps else ():
                following = self.next_level(level, stride)
                found |= {(level, following)} if following > level + 1 else set()
                ways.append((following, after))
        return found

    def main_line_ends(self, i: int) -> bool:
        """Whether the main line ends before step `i`, because it makes no leaf and has no later branches."""
        return not self.main_leaf and not any(step.side for step in self.steps[i:])

    def counts(self) -> PlanCounts:
        """Cost per prompt, without a model."""
        return self._counted

    @cached_property
    def _counted(self) -> PlanCounts:
        if self.given:
            return PlanCounts(0, 0, self.roots, self.roots, 0, 0, 0, 0, (), self.roots)
        main, evaluations, edges, trained_edges, trained_states, chain = self.roots, 0, 0, 0, 0, 0
        trained_steps: list[int] = []
        stored, kept = 0, False
        sides: list[_Side] = []
        for i, step in enumerate(self.steps):
            main = 0 if self.main_line_ends(i) else main
            goes_on = main and not self.main_line_ends(i + 1)
            children = main * self.main_children(i) if goes_on else 0
            due = [side for side in sides if side.level == i]
            evaluations += main + sum(side.states for side in due)
            leaving = self._leaving(i, main)
            moved = [move for side in due for move in side.moves(self)]
            edges += children + sum(side.states for side in moved + leaving)
            starts_kept, kept = kept, False
            if step.trained:
                std, side_std = (c.std if c else 0.0 for c in self._coefficients[i])
                moving = children if std > 0.0 or self.neighbours else 0
                kept = moving > 0
                moving += main * step.side if side_std > 0.0 else 0
                stored += moving + (main if moving and not starts_kept else 0)
                trained_edges += moving
                # If the main line ends at a step, a probe may be its only edge, and probes are never trained.
                trained_states += main if moving else 0
                trained_steps += [i] if moving else []
            sides = [side for side in sides if side.level > i] + moved + leaving
            main = children
        leaves = main + sum(side.states for side in sides)
        images = leaves - sum(side.states for side in sides if side.preview)
        chain = main * self.num_steps + sum(side.states * side.length for side in sides)
        alone = self.roots * (self.samples - 1) * (self.first_stochastic or 0)
        return PlanCounts(
            evaluations,
            chain,
            leaves,
            images,
            edges,
            edges + alone,
            trained_edges,
            trained_states,
            tuple(trained_steps),
            stored + leaves,
        )

    def _leaving(self, i: int, main: int) -> list[_Side]:
        """The side branches that leave at step `i`, as they are after the step."""
        step, coefficients = self.steps[i], self._coefficients[i][1]
        if coefficients is None or not main:
            return []
        if coefficients.std > 0.0:
            return [_Side(main * step.side, i + 1, step.strides, i + 1)]
        return _Side(main, i, step.completions, i, preview=True).moves(self)


@dataclass(frozen=True)
class _Side:
    """Side branches at one level: their number, how they go on, how many steps led here, whether they are previews."""

    states: int
    level: int
    completions: Strides
    length: int
    preview: bool = False

    def moves(self, plan: Plan) -> list[_Side]:
        return [
            _Side(self.states, plan.next_level(self.level, stride), after, self.length + 1, self.preview)
            for stride, after in onward(self.completions)
        ]


def _within(what: str, steps: Iterable[int], total: int) -> list[int]:
    found = sorted(set(steps))
    if found and not (found[0] >= 0 and found[-1] < total):
        raise ValueError(f"{what} {found} must be within 0 to {total - 1}")
    return found


def window_plan(
    sigmas: Sequence[float],
    window: Iterable[int],
    kernel: Kernel,
    *,
    samples: int,
    shared_noise: bool = True,
    solver: str | Solver = "euler",
    stochastic: Iterable[int] | None = None,
    probe: int | None = None,
    before: str | Solver | None = None,
) -> Plan:
    """Chains that are stochastic and trained inside a window and deterministic elsewhere (MixGRPO, 2507.21802).

    Args:
        sigmas: noise levels.
        window: trained steps. All steps but the last make it Flow-GRPO (2505.05470).
        kernel: kernel of the stochastic steps.
        samples: images per prompt, the group size G.
        shared_noise: whether a prompt's samples start from one noise.
        solver: solver of the deterministic steps.
        stochastic: further stochastic steps outside the window.
        probe: if given, every state from which a stochastic step starts is also finished without noise, with this
            stride (see `StepPlan.completions`). The step is compared with the result.
        before: solver of the deterministic steps before the first stochastic step; by default `solver`.

    Raises:
        ValueError: if the window is empty or outside the schedule.
    """
    total = len(sigmas) - 1
    trained = _within("the window", window, total)
    if not trained:
        raise ValueError("the window is empty; train at least one step")
    noisy = set(_within("stochastic steps", stochastic or (), total)) | set(trained)
    return _chains(
        tuple(sigmas), tuple(trained), tuple(sorted(noisy)), kernel, samples, shared_noise, solver, probe, before
    )


# A run asks for a plan at each iteration, and for the plans of all iterations before it starts; few of them differ.
@lru_cache(maxsize=64)
def _chains(
    sigmas: tuple[float, ...], trained: tuple[int, ...], noisy: tuple[int, ...], kernel: Kernel, samples: int,
    shared_noise: bool, solver: str | Solver, probe: int | None, before: str | Solver | None,
) -> Plan:  # fmt: skip
    probed = {"side": 1, "side_kernel": ODE, "completions": (probe,)} if probe is not None else {}
    steps = tuple(
        StepPlan(kernel=kernel, trained=i in trained, solver=solver, **probed)  # type: ignore[arg-type]
        if i in noisy
        else StepPlan(solver=before or solver if i < noisy[0] else solver)
        for i in range(len(sigmas) - 1)
    )
    roots, copies = (1, samples) if shared_noise else (samples, 1)
    return Plan(sigmas, steps, roots=roots, samples=copies)


def branch_plan(
    sigmas: Sequence[float],
    splits: Iterable[int],
    kernel: Kernel,
    *,
    width: int = 2,
    roots: int = 1,
    spread: float | None = None,
    trained: Iterable[int] | None = None,
    stochastic: Iterable[int] | None = None,
    solver: str | Solver = "euler",
) -> Plan:
    """Trees that split into `width` at given steps, stochastic everywhere (BranchGRPO, 2509.06040).

    Every stochastic step is trained, but the last one only if the kernel is exact. `trained` may name fewer steps. With
    `stochastic`, only the steps that it names and the splits are stochastic (BranchGRPO-Mix).
    """
    total = len(sigmas) - 1
    points = _within("split points", splits, total)
    if not points:
        raise ValueError(f"no split points; name at least one step from 0 to {total - 1}")
    noisy = set(range(total) if stochastic is None else _within("stochastic steps", stochastic, total)) | set(points)
    last = set() if kernel.exact else {total - 1}
    chosen = noisy - last if trained is None else set(_within("trained steps", trained, total)) & noisy
    steps = tuple(
        StepPlan(
            kernel=kernel if i in noisy else ODE,
            children=width if i in points else 1,
            spread=spread if i in points else None,
            trained=i in chosen,
            solver=solver,
        )
        for i in range(total)
    )
    return Plan(tuple(sigmas), steps, roots=roots)


def spine_plan(
    sigmas: Sequence[float],
    branch_steps: Iterable[int],
    kernel: Kernel,
    *,
    branches: int,
    roots: int = 1,
    solver: str | Solver = "euler",
    main_leaf: bool = False,
    completions: tuple[int, ...] = (1,),
    lead: int = 0,
) -> Plan:
    """A deterministic main line with stochastic branches at given steps, each finished deterministically.

    TempFlow-GRPO (2508.04324) has six branches at every step but the last. G²RPO (2510.01982) finishes each branch
    several times, at several `completions`, whose strides begin after `lead` single steps.
    """
    total = len(sigmas) - 1
    points = _within("branch steps", branch_steps, total)
    if not points:
        raise ValueError(f"no branch steps; name at least one from 0 to {total - 1}")
    steps = tuple(
        StepPlan(side=branches, side_kernel=kernel, completions=completions, lead=lead, trained=True, solver=solver)
        if i in points
        else StepPlan(solver=solver)
        for i in range(total)
    )
    return Plan(tuple(sigmas), steps, roots=roots, main_leaf=main_leaf)


def ode_plan(
    sigmas: Sequence[float],
    *,
    samples: int,
    solver: str | Solver = "euler",
    trained: Iterable[int] = (),
    spread: float | None = None,
) -> Plan:
    """Deterministic chains, each from its own noise, for methods whose loss needs no stochastic step.

    Args:
        sigmas: noise levels.
        samples: images per prompt.
        solver: solver of every step.
        trained: steps that are trained as choices among neighbours (Neighbor GRPO); empty for forward-process losses.
        spread: like `StepPlan.spread`, but for the initial noises of a prompt.
    """
    chosen = set(_within("trained steps", trained, len(sigmas) - 1))
    steps = tuple(StepPlan(trained=i in chosen, solver=solver) for i in range(len(sigmas) - 1))
    return Plan(tuple(sigmas), steps, roots=samples, root_spread=spread, neighbours=bool(chosen))


def given_plan(sigmas: Sequence[float], *, samples: int) -> Plan:
    """No sampling: the data give `samples` images for each prompt, and a loss noises them to some of the levels."""
    return Plan(tuple(sigmas), tuple(StepPlan() for _ in range(len(sigmas) - 1)), roots=samples, given=True)
