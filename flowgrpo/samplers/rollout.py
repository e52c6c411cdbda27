"""The executor: it walks any plan as a tree, and evaluates each distinct state once.

All prompts advance together, one denoising step at a time. States are evaluated in batches of a fixed size and order.
The batches of trained states are recorded, see `transitions`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.addressing import address
from .kernels import Coefficients
from .moves import GaussianMoves, Moved, Moves
from .plans import Plan, Strides, onward
from .solvers import History
from .transitions import Rollout, Transitions, Velocity

Guide = Callable[[Tensor, Tensor, int, Sequence[int]], Tensor]
"""`guide(x [N, ...], v [N, ...], i, prompts [N]) -> [N, ...]`: the shift of the standard normal noise of step i."""


Store = Callable[[Tensor], Tensor]
"""`store(x) -> x`, possibly on another device."""


def _as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass
class _Front:
    """The states of one level: first the main line, then side branches, of which some wait for a later level.

    `kept` has the states of the main line as they are stored, if they are stored.
    """

    x: Tensor
    node: list[int]
    key: list[int]
    prompt: list[int]
    main: int
    history: History
    level: list[int]
    strides: list[tuple[int, ...]]
    kept: Tensor | None = None

    def due(self, i: int) -> list[int]:
        """Rows that take step `i`."""
        return [row for row, level in enumerate(self.level) if level == i]


@dataclass
class _Part:
    """A move of some states of a front: the rows from which they come, and their next states.

    `kept` has the next states as they are stored, if they are stored.
    """

    rows: list[int]
    x: Tensor
    node: list[int]
    key: list[int]
    level: int
    strides: list[tuple[int, ...]]
    kept: Tensor | None = None


@dataclass(frozen=True)
class _Start:
    """The stored states of a main line, with what `Transitions` says about the states of its edges."""

    x: Tensor
    velocity: Tensor
    prompt: tuple[int, ...]
    batches: tuple[slice, ...]


class _Tree:
    def __init__(self, roots: Sequence[tuple[int, int]]) -> None:
        count = len(roots)
        self.parent, self.depth, self.branch, self.stride = [-1] * count, [0] * count, [0] * count, [1] * count
        self.prompt, self.root = [p for p, _ in roots], [r for _, r in roots]
        self.log_prob = [torch.zeros(count)]

    def grow(
        self, parents: Sequence[int], level: int, *, branch: int = 0, stride: int = 1, log_prob: Tensor | None = None
    ) -> list[int]:
        """Add a child at `level` to each parent. With `branch` above 0, the child leaves the main line there."""
        first = len(self.parent)
        self.parent += parents
        self.depth += [level] * len(parents)
        self.prompt += [self.prompt[p] for p in parents]
        self.root += [self.root[p] for p in parents]
        self.branch += [branch or self.branch[p] for p in parents]
        self.stride += [stride] * len(parents)
        self.log_prob.append(torch.zeros(len(parents)) if log_prob is None else log_prob.cpu())
        return list(range(first, len(self.parent)))


class RolloutRunner:
    """Runs a plan for a list of prompts.

    Args:
        velocity: the model.
        plan: the plan to run.
        shape: shape of one state, without the batch dimension.
        dtype: storage dtype of the states.
        device: device of the states.
        batch: largest number of states in one call of the model.
        cuts: indices of prompts at which batches of trained states end. So the states of a range of prompts can be
            replayed alone (for several optimizer steps per rollout).
        guide: if given, its shift is added to the noise of the main line's stochastic steps.
        store: if given, the states of trained edges and the final states are kept as `store` returns them. A state that
            is the end of one trained edge and the start of others is stored once.
        initial_std: standard deviation of the initial noises.
        moves: moves the states; by default, states are latents that move by Gaussian steps. If given, `shape`, `dtype`
            and `initial_std` have no effect.
    """

    def __init__(
        self,
        velocity: Velocity,
        plan: Plan,
        shape: Sequence[int] = (),
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batch: int = 64,
        cuts: Sequence[int] = (),
        guide: Guide | None = None,
        store: Store | None = None,
        initial_std: float = 1.0,
        moves: Moves | None = None,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch is {batch}; use at least 1")
        self.velocity, self.plan, self.guide = velocity, plan, guide
        self.store: Store = store or _as_it_is
        self.batch, self.cuts = batch, tuple(cuts)
        self.moves: Moves = moves or GaussianMoves(shape, dtype, torch.device(device), initial_std)

    @torch.no_grad()
    def run(
        self,
        keys: Sequence[int],
        first: int = 0,
        noises: Sequence[int] | None = None,
        numbers: Sequence[Sequence[int]] | None = None,
    ) -> Rollout:
        """Roll out one tree for each root; `keys[k]` addresses all noise of prompt `first + k`.

        With `noises`, the roots start from the noises of these seeds, prompt by prompt, instead of their own noises.
        `numbers` are the numbers of the roots of each prompt, as many as the plan has roots; without it, they count
        from 0. A root's number addresses its noise, so roots of one number are equal in every rollout of a prompt.

        The result of a prompt does not depend on the other prompts of the call, except for the rounding of the model's
        own batched arithmetic.
        """
        plan = self.plan
        if plan.given:
            raise ValueError("the plan takes its images from the data, so there is nothing to sample and no tree")
        own = numbers or [range(plan.roots)] * len(keys)
        if any(len(each) != plan.roots for each in own) or len(own) != len(keys):
            raise ValueError(
                f"numbers has {[len(each) for each in own]} roots of each prompt; give {plan.roots} for each of "
                f"{len(keys)} prompts"
            )
        roots = [(first + k, r) for k in range(len(keys)) for r in own[k]]
        tree = _Tree(roots)
        root_keys = list(noises or [address(keys[p - first], 0, r) for p, r in roots])
        common = [address(key, 0, -1) for key in keys]
        front = _Front(
            self.moves.start(root_keys, common, plan.root_spread),
            list(range(len(roots))),
            root_keys,
            [p for p, _ in roots],
            len(roots),
            History(),
            [0] * len(roots),
            [(1,)] * len(roots),
        )
        transitions: list[Transitions] = []
        states = [front.x] if self.moves.keeps_states else []
        evaluations = 0
        for i in range(plan.num_steps):
            if plan.main_line_ends(i):
                front = _select(front, range(front.main, len(front.node)), main=0)
            due = front.due(i)
            if not due:
                continue
            batches = self._batches(i, front, len(due))
            v = torch.cat([self._evaluate(front, i, due[rows]) for rows in batches])
            evaluations += len(due)
            front, trained, reached = self._advance(front, v, i, tree, batches)
            transitions += trained
            states += reached if self.moves.keeps_states else []
        order = sorted(range(len(front.node)), key=lambda k: (front.prompt[k], front.node[k]))
        leaves = _select(front, order, main=0)
        return Rollout(
            parent=torch.tensor(tree.parent),
            depth=torch.tensor(tree.depth),
            prompt=torch.tensor(tree.prompt),
            root=torch.tensor(tree.root),
            branch=torch.tensor(tree.branch),
            stride=torch.tensor(tree.stride),
            log_prob=torch.cat(tree.log_prob),
            leaf=torch.tensor(leaves.node),
            x=self.store(leaves.x),
            transitions=tuple(transitions),
            evaluations=evaluations,
            states=torch.cat(states) if states else None,
        )

    def _batches(self, i: int, front: _Front, due: int) -> list[slice]:
        """Trained states have batches of their own, so that these batches can be evaluated again."""
        bounds = [0, due]
        if self.plan.steps[i].trained:
            main_prompts = front.prompt[: front.main]
            bounds += [front.main, *(bisect.bisect_left(main_prompts, cut) for cut in self.cuts)]
        bounds = sorted(set(bounds))
        return [
            slice(start, min(start + self.batch, stop))
            for low, stop in itertools.pairwise(bounds)
            for start in range(low, stop, self.batch)
        ]

    def _evaluate(self, front: _Front, i: int, rows: list[int]) -> Tensor:
        whole = rows == list(range(rows[0], rows[-1] + 1))
        x = front.x[rows[0] : rows[-1] + 1] if whole else front.x[torch.tensor(rows, device=front.x.device)]
        return self.velocity(x, i, [front.prompt[row] for row in rows])

    def _advance(
        self, front: _Front, v: Tensor, i: int, tree: _Tree, batches: list[slice]
    ) -> tuple[_Front, list[Transitions], list[Tensor]]:
        plan, step_plan = self.plan, self.plan.steps[i]
        main_coefficients, side_coefficients = plan.coefficients(i)
        parts: list[_Part] = []
        trained: list[Transitions] = []
        due = front.due(i)
        place = {row: k for k, row in enumerate(due)}
        main = list(range(front.main))
        start = self._start(front, v, batches) if step_plan.trained and main else None

        def stochastic(coefficients: Coefficients, children: int, kind: int) -> None:
            keys = [address(front.key[s], i + 1, kind, c) for s in main for c in range(children)]
            rows = [s for s in main for _ in range(children)]
            index = torch.tensor(rows, device=v.device)
            common = [address(front.key[s], i + 1, 2 + kind) for s in main]
            shift = None
            if self.guide is not None and kind == 0:
                shift = self.guide(front.x[: front.main], v[: front.main], i, front.prompt[: front.main])[index]
            taken = self.moves.sample(v[index], front.x[index], coefficients, keys, common, step_plan.spread, shift)
            branch = i + 1 if kind == 1 else 0
            nodes = tree.grow([front.node[s] for s in rows], i + 1, branch=branch, log_prob=taken.log_prob)
            strides = step_plan.strides if kind == 1 else (1,)
            part = _Part(rows, taken.x, nodes, keys, i + 1, [strides] * len(rows))
            parts.append(part)
            if start is not None:
                trained.append(self._record(start, part, i, coefficients, index, taken, shift))

        def deterministic(source: list[int], stride: int, branch: int = 0, after: Strides = ()) -> None:
            index = torch.tensor(source, device=v.device)
            velocity = v[torch.tensor([place[s] for s in source], device=v.device)]
            level = plan.next_level(i, stride)
            moved = self.moves.solve(
                step_plan.solver, velocity, front.x[index], plan.sigmas[i], plan.sigmas[level],
                front.history.select(index), level == plan.num_steps,
            )  # fmt: skip
            nodes = tree.grow([front.node[s] for s in source], level, branch=branch, stride=stride)
            keys = [front.key[s] for s in source]
            part = _Part(source, moved, nodes, keys, level, [after or (stride,)] * len(source))
            parts.append(part)
            if start is not None and plan.neighbours:
                undefined = Moved(moved, torch.full((len(source),), torch.nan))
                trained.append(self._record(start, part, i, main_coefficients, index, undefined, None))

        if front.main and not plan.main_line_ends(i + 1):
            if main_coefficients.std > 0.0:
                stochastic(main_coefficients, plan.main_children(i), 0)
            else:
                deterministic(main, 1)
        main_width = len(parts[-1].rows) if parts else 0
        if side_coefficients is not None and main:
            if side_coefficients.std > 0.0:
                stochastic(side_coefficients, step_plan.side, 1)
            else:
                for stride in step_plan.completions:
                    deterministic(main, stride, branch=i + 1)
        for strides in sorted({front.strides[row] for row in due[front.main :]}):
            for stride, after in onward(strides):
                rows = [row for row in due[front.main :] if front.strides[row] == strides]
                deterministic(rows, stride, after=after)
        return self._next_front(front, v, i, parts, main_width), trained, [part.x for part in parts]

    def _next_front(self, front: _Front, v: Tensor, i: int, parts: list[_Part], main: int) -> _Front:
        """The front after step `i`: first the states that moved, then the states that wait."""
        waiting = [row for row, level in enumerate(front.level) if level > i]
        rows = [row for part in parts for row in part.rows]
        history = History()
        if not waiting:
            history = self.moves.observe(v, front.x, self.plan.sigmas[i]).select(torch.tensor(rows, device=v.device))
        rows += waiting
        states = [part.x for part in parts]
        if waiting:
            states.append(front.x[torch.tensor(waiting, device=v.device)])
        return _Front(
            torch.cat(states) if len(states) > 1 else states[0],
            [node for part in parts for node in part.node] + [front.node[row] for row in waiting],
            [key for part in parts for key in part.key] + [front.key[row] for row in waiting],
            [front.prompt[row] for row in rows],
            main,
            history,
            [part.level for part in parts for _ in part.rows] + [front.level[row] for row in waiting],
            [strides for part in parts for strides in part.strides] + [front.strides[row] for row in waiting],
            parts[0].kept if main else None,
        )

    def _start(self, front: _Front, v: Tensor, batches: list[slice]) -> _Start:
        """The main line as trained edges start from it. If its states are the ends of trained edges, they are there."""
        x = self.store(_alone(front.x, front.main)) if front.kept is None else front.kept
        return _Start(
            x=x,
            velocity=self.store(self.moves.kept(_alone(v, front.main))),
            prompt=tuple(front.prompt[: front.main]),
            batches=tuple(rows for rows in batches if rows.stop <= front.main),
        )

    def _record(
        self,
        start: _Start,
        part: _Part,
        i: int,
        coefficients: Coefficients,
        index: Tensor,
        taken: Moved,
        shift: Tensor | None,
    ) -> Transitions:
        """The edges of a move. The ends of the edges are stored, and the move keeps them for the next step."""
        part.kept = self.store(part.x)
        return Transitions(
            step=i,
            coefficients=coefficients,
            x=start.x,
            velocity=start.velocity,
            prompt=start.prompt,
            state=index,
            x_next=part.kept,
            node=torch.tensor(part.node),
            log_prob=taken.log_prob,
            batches=start.batches,
            shift=None if shift is None else self.store(shift),
            token_log_prob=taken.token_log_prob,
        )


def _alone(x: Tensor, count: int) -> Tensor:
    """The first rows of a tensor, in memory of their own, so that a record does not hold the other rows in memory."""
    return x if count == len(x) else x[:count].clone()


def _select(front: _Front, rows: Sequence[int], main: int) -> _Front:
    index = torch.tensor(list(rows), dtype=torch.long, device=front.x.device)
    return _Front(
        front.x[index],
        [front.node[k] for k in rows],
        [front.key[k] for k in rows],
        [front.prompt[k] for k in rows],
        main,
        front.history.select(index),
        [front.level[k] for k in rows],
        [front.strides[k] for k in rows],
    )
