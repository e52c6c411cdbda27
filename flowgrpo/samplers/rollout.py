"""The executor: walks any plan as a tree, evaluating each distinct state once.

All prompts advance together, one denoising step at a time. States are evaluated in batches of a fixed size and
order, and the batches of trained states are recorded: `replay` evaluates the very same batches again with
gradients, so that the prediction, and with it every ratio, is the same to the last bit until the weights move.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import Coefficients, Step, step
from .plans import Plan
from .solvers import History, observe, solve

Velocity = Callable[[Tensor, int, Sequence[int]], Tensor]
"""`velocity(x [N, ...], i, prompts [N]) -> [N, ...]`: the prediction at `sigmas[i]` for states of those prompts."""


def address(*parts: int) -> int:
    """A 63-bit seed for a tuple of integers: distinct places draw independent noise, in any order of drawing."""
    packed = struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def draw_noise(shape: Sequence[int], keys: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Standard normal noise [len(keys), *shape], float32; each row is a function of its key alone."""
    rows = [torch.randn(tuple(shape), generator=torch.Generator().manual_seed(key)) for key in keys]
    return torch.stack(rows).to(device)


@dataclass(frozen=True)
class Transitions:
    """The trained edges of one denoising step that share a kernel.

    Attributes:
        step: index of the denoising step.
        coefficients: its transition.
        x: [S, ...] distinct states the edges start from, storage dtype.
        velocity: [S, ...] what the sampling policy predicted there.
        prompt: [S] prompt of each state, as an index into the rollout's prompts.
        state: [E] state each edge starts from, in 0..S-1, ascending.
        x_next: [E, ...] where each edge ends, storage dtype.
        node: [E] node id of that end.
        log_prob: [E] mean-reduced log-density of each edge, float32.
        batches: slices of the states, as they were evaluated.
    """

    step: int
    coefficients: Coefficients
    x: Tensor
    velocity: Tensor
    prompt: tuple[int, ...]
    state: Tensor
    x_next: Tensor
    node: Tensor
    log_prob: Tensor
    batches: tuple[slice, ...]

    def edges_of(self, batch: slice) -> slice:
        """The edges that start from a slice of the states."""
        bounds = torch.searchsorted(self.state, torch.tensor([batch.start, batch.stop], device=self.state.device))
        first, stop = bounds.tolist()
        return slice(first, stop)


@dataclass(frozen=True)
class Rollout:
    """A finished rollout of P prompts.

    Attributes:
        parent: [N] parent of each node, -1 for a root.
        depth: [N] denoising steps taken to reach it.
        prompt: [N] its prompt, 0..P-1.
        root: [N] its root's number within the prompt.
        branch: [N] depth at which its side branch left the main line, 0 on the main line.
        leaf: [L] node ids of the leaves, prompt by prompt.
        x: [L, ...] final states, storage dtype.
        transitions: trained edges, by denoising step.
        evaluations: states the denoiser was called on.
    """

    parent: Tensor
    depth: Tensor
    prompt: Tensor
    root: Tensor
    branch: Tensor
    leaf: Tensor
    x: Tensor
    transitions: tuple[Transitions, ...]
    evaluations: int

    @property
    def leaf_prompt(self) -> Tensor:
        """[L] prompt of each leaf."""
        return self.prompt[self.leaf]


@dataclass
class _Front:
    """The states of one depth: main line first, then side branches."""

    x: Tensor
    node: list[int]
    key: list[int]
    prompt: list[int]
    main: int
    history: History


@dataclass
class _Tree:
    parent: list[int]
    depth: list[int]
    prompt: list[int]
    root: list[int]
    branch: list[int]

    def grow(self, parents: Sequence[int], leaving: bool = False) -> list[int]:
        first = len(self.parent)
        self.parent += parents
        self.depth += [self.depth[p] + 1 for p in parents]
        self.prompt += [self.prompt[p] for p in parents]
        self.root += [self.root[p] for p in parents]
        self.branch += [self.depth[p] + 1 if leaving else self.branch[p] for p in parents]
        return list(range(first, len(self.parent)))


class RolloutRunner:
    """Runs a plan for a list of prompts.

    Args:
        velocity: the model.
        plan: what to do.
        shape: of one state, without the batch.
        dtype: storage dtype of the states.
        device: of the states.
        batch: states in one call of the model.
        cuts: prompts, as indices, at which batches of trained states end, so that the states of a range of
            prompts can be replayed alone (several optimizer steps per rollout).
    """

    def __init__(
        self,
        velocity: Velocity,
        plan: Plan,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batch: int = 64,
        cuts: Sequence[int] = (),
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch is {batch}; use at least 1")
        self.velocity, self.plan, self.shape = velocity, plan, tuple(shape)
        self.dtype, self.device, self.batch, self.cuts = dtype, torch.device(device), batch, tuple(cuts)

    @torch.no_grad()
    def run(self, keys: Sequence[int]) -> Rollout:
        """Roll out one tree for each key; `keys[p]` addresses all noise of prompt `p`.

        The result does not depend on which other prompts run beside it, but for the rounding of the model's
        own batched arithmetic.
        """
        plan, prompts = self.plan, len(keys)
        roots = [(p, r) for p in range(prompts) for r in range(plan.roots)]
        zeros = [0] * len(roots)
        tree = _Tree([-1] * len(roots), [*zeros], [p for p, _ in roots], [r for _, r in roots], zeros)
        root_keys = [address(keys[p], 0, r) for p, r in roots]
        front = _Front(
            draw_noise(self.shape, root_keys, self.device).to(self.dtype),
            list(range(len(roots))),
            root_keys,
            [p for p, _ in roots],
            len(roots),
            History(),
        )
        transitions: list[Transitions] = []
        evaluations = 0
        for i in range(plan.num_steps):
            if plan.main_line_ends(i):
                front = _select(front, range(front.main, len(front.node)), main=0)
            batches = self._batches(i, front)
            v = self._evaluate(front, i, batches)
            evaluations += len(front.node)
            front, trained = self._advance(front, v, i, tree, batches)
            transitions += trained
        order = sorted(range(len(front.node)), key=lambda k: (front.prompt[k], front.node[k]))
        leaves = _select(front, order, main=0)
        return Rollout(
            parent=torch.tensor(tree.parent),
            depth=torch.tensor(tree.depth),
            prompt=torch.tensor(tree.prompt),
            root=torch.tensor(tree.root),
            branch=torch.tensor(tree.branch),
            leaf=torch.tensor(leaves.node),
            x=leaves.x,
            transitions=tuple(transitions),
            evaluations=evaluations,
        )

    def _batches(self, i: int, front: _Front) -> list[slice]:
        """Trained states are never batched with others, so that their batches can be evaluated again alone."""
        bounds = [0, len(front.node)]
        if self.plan.steps[i].trained:
            main_prompts = front.prompt[: front.main]
            bounds += [front.main, *(bisect.bisect_left(main_prompts, cut) for cut in self.cuts)]
        bounds = sorted(set(bounds))
        return [
            slice(start, min(start + self.batch, stop))
            for low, stop in itertools.pairwise(bounds)
            for start in range(low, stop, self.batch)
        ]

    def _evaluate(self, front: _Front, i: int, batches: Sequence[slice]) -> Tensor:
        return torch.cat([self.velocity(front.x[rows], i, front.prompt[rows]) for rows in batches])

    def _advance(
        self, front: _Front, v: Tensor, i: int, tree: _Tree, batches: list[slice]
    ) -> tuple[_Front, list[Transitions]]:
        plan, step_plan = self.plan, self.plan.steps[i]
        main_coefficients, side_coefficients = plan.coefficients(i)
        goes_on = front.main > 0 and not plan.main_line_ends(i + 1)
        parts: list[tuple[list[int], Tensor, list[int], list[int]]] = []
        trained: list[Transitions] = []
        main_width = 0

        def stochastic(source: list[int], coefficients: Coefficients, children: int, kind: int) -> None:
            keys = [address(front.key[s], i + 1, kind, c) for s in source for c in range(children)]
            rows = [s for s in source for _ in range(children)]
            index = torch.tensor(rows, device=v.device)
            noise = self._branch_noise(source, front, keys, i, kind)
            taken = step(v[index], front.x[index], coefficients, noise=noise, dtype=self.dtype)
            nodes = tree.grow([front.node[s] for s in rows], leaving=kind == 1)
            parts.append((rows, taken.x_next, nodes, keys))
            if step_plan.trained:
                trained.append(self._record(front, v, i, coefficients, index, taken, nodes, batches))

        def deterministic(source: list[int]) -> None:
            index = torch.tensor(source, device=v.device)
            low, high = plan.sigmas[i], plan.sigmas[i + 1]
            moved, _ = solve(
                step_plan.solver, v[index], front.x[index], low, high, front.history.select(index),
                last=i == plan.num_steps - 1,
            )  # fmt: skip
            nodes = tree.grow([front.node[s] for s in source])
            parts.append((source, moved.to(self.dtype), nodes, [front.key[s] for s in source]))

        main = list(range(front.main))
        if goes_on:
            if main_coefficients.std > 0.0:
                stochastic(main, main_coefficients, plan.main_children(i), 0)
            else:
                deterministic(main)
            main_width = len(parts[-1][0])
        if side_coefficients is not None and main:
            stochastic(main, side_coefficients, step_plan.side, 1)
        if front.main < len(front.node):
            deterministic(list(range(front.main, len(front.node))))

        rows = [row for part in parts for row in part[0]]
        seen = observe(v, front.x, plan.sigmas[i]).select(torch.tensor(rows, device=v.device))
        following = _Front(
            torch.cat([part[1] for part in parts]),
            [node for part in parts for node in part[2]],
            [key for part in parts for key in part[3]],
            [front.prompt[row] for row in rows],
            main_width,
            seen,
        )
        return following, trained

    def _branch_noise(self, source: list[int], front: _Front, keys: list[int], i: int, kind: int) -> Tensor:
        own = draw_noise(self.shape, keys, self.device)
        spread = self.plan.steps[i].spread
        if spread is None:
            return own
        common = draw_noise(self.shape, [address(front.key[s], i + 1, 2 + kind) for s in source], self.device)
        repeated = common.repeat_interleave(len(keys) // len(source), dim=0)
        return (repeated + spread * own) / (1.0 + spread**2) ** 0.5

    def _record(
        self,
        front: _Front,
        v: Tensor,
        i: int,
        coefficients: Coefficients,
        index: Tensor,
        taken: Step,
        nodes: list[int],
        batches: list[slice],
    ) -> Transitions:
        return Transitions(
            step=i,
            coefficients=coefficients,
            x=front.x[: front.main],
            velocity=v[: front.main],
            prompt=tuple(front.prompt[: front.main]),
            state=index,
            x_next=taken.x_next,
            node=torch.tensor(nodes),
            log_prob=taken.log_prob,
            batches=tuple(rows for rows in batches if rows.stop <= front.main),
        )


def _select(front: _Front, rows: Sequence[int], main: int) -> _Front:
    index = torch.tensor(list(rows), dtype=torch.long, device=front.x.device)
    return _Front(
        front.x[index],
        [front.node[k] for k in rows],
        [front.key[k] for k in rows],
        [front.prompt[k] for k in rows],
        main,
        front.history.select(index),
    )


@dataclass(frozen=True)
class Replay:
    """Trained edges evaluated again, one batch of states of one denoising step.

    Attributes:
        transitions: the step they belong to.
        edges: which of its edges.
        states: which of its states.
        velocity: [s, ...] what the present policy predicts at those states, with gradients.
    """

    transitions: Transitions
    edges: slice
    states: slice
    velocity: Tensor

    def old_velocity(self) -> Tensor:
        """[s, ...] the sampling policy's prediction at the same states."""
        return self.transitions.velocity[self.states]

    def rows(self) -> Tensor:
        """[e] state of each edge, as an index into `velocity`."""
        return self.transitions.state[self.edges] - self.states.start


def replay(velocity: Velocity, transitions: Transitions, batch: slice) -> Replay:
    """Evaluate one recorded batch of states with the present policy, keeping the graph."""
    edges = transitions.edges_of(batch)
    v = velocity(transitions.x[batch], transitions.step, transitions.prompt[batch])
    return Replay(transitions, edges, batch, v)


def batches_of(rollout: Rollout) -> Iterator[tuple[Transitions, slice]]:
    """Every recorded batch of trained states, in the order of sampling."""
    for transitions in rollout.transitions:
        for batch in transitions.batches:
            yield transitions, batch
