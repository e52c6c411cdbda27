"""The records of a rollout: their storage, the joining of chunks of prompts, and the replay of trained edges.

`replay` evaluates exactly the batches of the rollout again, with gradients. So until the weights move, every prediction
and every ratio is the same to the last bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .kernels import Coefficients


def to_host(x: Tensor) -> Tensor:
    """A tensor in host memory: itself if it is there, else a copy, page-locked if it comes from a CUDA device."""
    if x.device.type == "cpu":
        return x
    # The call waits for the copy, because the next reader may not be the device.
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda").copy_(x)


def brought(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device that computes with it: the tensor itself if it is already there."""
    return x.to(device, non_blocking=True)


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat` along the first dimension, page-locked if the parts are. The dtype holds the numbers of all parts."""
    if parts[0].device.type != "cpu" or not parts[0].is_pinned():
        return torch.cat(list(parts))
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    return torch.cat(list(parts), out=torch.empty(shape, dtype=dtype, pin_memory=True))


def narrowed(x: Tensor) -> Tensor:
    """The same numbers in 16 bits, if every number is exact in bfloat16 or in float16; else the tensor itself.

    A model that computes in 16 bits hands its prediction over in float32. The numbers of this prediction need 16 bits.
    """
    for dtype in (torch.bfloat16, torch.float16):
        # The first row is asked first, because it rules most tensors out and costs little.
        if x.dtype == torch.float32 and _fits(x[:1], dtype) and _fits(x, dtype):
            return x.to(dtype)
    return x


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(x.to(dtype).to(x.dtype), x)


Velocity = Callable[[Tensor, int, Sequence[int]], Tensor]
"""`velocity(x [N, ...], i, prompts [N]) -> [N, ...]`: the prediction at `sigmas[i]` for states of those prompts."""


@dataclass(frozen=True)
class Transitions:
    """The trained edges of one denoising step that share a kernel.

    Between uses, `x`, `velocity`, `x_next` and `shift` may be on another device than the one that computes with them.
    No tensor is changed after it was made, because records share tensors. If edges end where the trained edges of the
    next step start, `x_next` is the `x` of the next record. Two records of one step have one `x` and one `velocity`.

    Attributes:
        step: index of the denoising step.
        coefficients: its transition.
        x: [S, ...] distinct states from which the edges start, storage dtype.
        velocity: [S, ...] prediction of the sampling policy at these states; in 16 bits if these hold it exactly, else
            in float32.
        prompt: [S] prompt of each state, as an index into the prompts of the rollout.
        state: [E] state from which each edge starts, in 0..S-1, ascending.
        x_next: [E, ...] state at which each edge ends, storage dtype.
        node: [E] node id of the end of each edge.
        log_prob: [E] log-density of each edge, averaged over elements, float32; NaN for a deterministic edge.
        shift: [E, ...] shift that a guide added to the noise of each edge; None without a guide.
        batches: the batches in which the states were evaluated, as slices.
        token_log_prob: [E, L] log-prob of each token that an edge reveals, 0 elsewhere; None for latents.
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
    shift: Tensor | None = None
    token_log_prob: Tensor | None = None

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
        depth: [N] number of denoising steps to each node, skipped steps included.
        prompt: [N] prompt of each node, 0..P-1; a chunk has only the numbers of its own prompts.
        root: [N] number of each node's root within the prompt.
        branch: [N] depth at which the node's side branch left the main line; 0 on the main line.
        stride: [N] stride with which the node's side branch is finished (`StepPlan.completions`); 1 if it is not
            decided yet.
        log_prob: [N] log-density of the edge into each node, averaged over elements; 0 for a root or a deterministic
            edge.
        leaf: [L] node ids of the leaves, prompt by prompt.
        x: [L, ...] final states, storage dtype.
        transitions: trained edges, by denoising step.
        evaluations: number of states on which the denoiser was called.
        states: [N, ...] the state of each node, where the moves keep them; else None.
    """

    parent: Tensor
    depth: Tensor
    prompt: Tensor
    root: Tensor
    branch: Tensor
    stride: Tensor
    log_prob: Tensor
    leaf: Tensor
    x: Tensor
    transitions: tuple[Transitions, ...]
    evaluations: int
    states: Tensor | None = None

    @property
    def leaf_prompt(self) -> Tensor:
        """[L] prompt of each leaf."""
        return self.prompt[self.leaf]


def given_rollout(prompts: Sequence[int], each: int, steps: int, x: Tensor) -> Rollout:
    """Images that no step has made, as a rollout: each is a root and a leaf.

    Args:
        prompts: [L] prompt of each image, ascending.
        each: number of images of a prompt.
        steps: denoising steps of the plan.
        x: [L, ...] final states.
    """
    count = len(prompts)
    none, nothing = torch.zeros(count, dtype=torch.long), torch.zeros(count)
    return Rollout(
        parent=none - 1, depth=none + steps, prompt=torch.tensor(prompts), root=torch.arange(count) % each,
        branch=none, stride=none + 1, log_prob=nothing, leaf=torch.arange(count), x=x, transitions=(), evaluations=0,
    )  # fmt: skip


@dataclass(frozen=True)
class ReplayedEdges:
    """Trained edges evaluated again, one batch of states of one denoising step.

    Attributes:
        transitions: the transitions of the denoising step.
        edges: the edges of these transitions that were evaluated.
        states: the states of these transitions that were evaluated.
        velocity: [s, ...] prediction of the current policy at these states, with gradients.
    """

    transitions: Transitions
    edges: slice
    states: slice
    velocity: Tensor

    def old_velocity(self) -> Tensor:
        """[s, ...] the sampling policy's prediction at the same states, as it is stored."""
        return self.transitions.velocity[self.states]

    def rows(self) -> Tensor:
        """[e] state of each edge, as an index into `velocity`."""
        return self.transitions.state[self.edges] - self.states.start


def replay(velocity: Velocity, transitions: Transitions, batch: slice) -> ReplayedEdges:
    """Evaluate one recorded batch of states with the current policy, and keep the graph."""
    edges = transitions.edges_of(batch)
    v = velocity(transitions.x[batch], transitions.step, transitions.prompt[batch])
    return ReplayedEdges(transitions, edges, batch, v)


def batches_of(rollout: Rollout) -> Iterator[tuple[Transitions, slice]]:
    """Every recorded batch of trained states, in the order of sampling."""
    for transitions in rollout.transitions:
        for batch in transitions.batches:
            yield transitions, batch


def edge_bounds(counts: Sequence[int], updates: int) -> list[int]:
    """The first batch of each part, and at last the number of batches. The parts have about as many edges each.

    Args:
        counts: number of edges in each batch; no batch is cut.
        updates: number of parts; each has a batch at least.

    Raises:
        ValueError: there are more parts than batches.
    """
    if updates > len(counts):
        raise ValueError(
            f"optimizer.updates is {updates} with optimizer.cut edges, and a rollout has {len(counts)} batches of "
            f"trained states; use at most {len(counts)} updates, or a smaller rollout.batch"
        )
    before = [0, *itertools.accumulate(counts)]
    bounds = [0]
    for part in range(1, updates):
        share = before[-1] * part / updates
        nearest = min(range(len(before)), key=lambda place: abs(before[place] - share))
        bounds.append(min(max(nearest, bounds[-1] + 1), len(counts) - updates + part))
    return [*bounds, len(counts)]


def chunks_of(count: int, size: int | None) -> Iterator[slice]:
    """Ranges of `size` prompts, the last one possibly shorter; one range of all `count` prompts if `size` is None."""
    for first in range(0, count, size or max(count, 1)):
        yield slice(first, min(first + (size or count), count))


def join_rollouts(chunks: list[Rollout]) -> Rollout:
    """Join rollouts of one plan into one rollout; the numbers of the prompts rise from chunk to chunk.

    Nodes are numbered chunk by chunk, and not level by level over all prompts. Everything else is as if all prompts had
    run at once. Leaves, states and edges are in the order of their prompts, and the batches of trained states are the
    batches that were evaluated.

    Args:
        chunks: at least one chunk. The list is emptied, so that only the states of one denoising step at a time are in
            memory twice.
    """
    if len(chunks) == 1:
        return chunks.pop()
    nodes = _starts([len(chunk.parent) for chunk in chunks])
    waiting = [list(chunk.transitions) for chunk in chunks]
    # One plan takes the same steps with every prompt, so all chunks have the same transitions.
    steps = len(waiting[0])
    joining = _Joining(waiting)
    joint = Rollout(
        parent=torch.cat([torch.where(c.parent < 0, c.parent, c.parent + n) for c, n in zip(chunks, nodes)]),
        depth=torch.cat([chunk.depth for chunk in chunks]),
        prompt=torch.cat([chunk.prompt for chunk in chunks]),
        root=torch.cat([chunk.root for chunk in chunks]),
        branch=torch.cat([chunk.branch for chunk in chunks]),
        stride=torch.cat([chunk.stride for chunk in chunks]),
        log_prob=torch.cat([chunk.log_prob for chunk in chunks]),
        leaf=torch.cat([chunk.leaf + n for chunk, n in zip(chunks, nodes)]),
        x=concatenated([chunk.x for chunk in chunks]),
        transitions=(),
        evaluations=sum(chunk.evaluations for chunk in chunks),
        states=_joined([chunk.states for chunk in chunks]),
    )
    chunks.clear()
    return replace(
        joint, transitions=tuple(_join([w.pop(0) for w in waiting], nodes, joining, k) for k in range(steps))
    )


_Place = tuple[int, str]
"""The number of a record in a rollout, and the name of one of its tensors."""


class _Joining:
    """Joins the tensors of chunks. A tensor that is in several places of every chunk is joined once.

    Args:
        waiting: the records of each chunk.
    """

    def __init__(self, waiting: list[list[Transitions]]) -> None:
        # The identity of a tensor is unique only while all tensors are in memory, so all places are compared here.
        first: dict[tuple[int, ...], _Place] = {}
        self._first: dict[_Place, _Place] = {}
        for k, parts in enumerate(zip(*waiting)):
            for name in ("x", "velocity", "x_next"):
                tensors = tuple(id(getattr(part, name)) for part in parts)
                self._first[k, name] = first.setdefault(tensors, (k, name))
        self._made: dict[_Place, Tensor] = {}

    def joint(self, place: _Place, parts: Sequence[Tensor]) -> Tensor:
        """The tensors of all chunks in one place, as one tensor."""
        first = self._first[place]
        if first not in self._made:
            self._made[first] = concatenated(parts)
        return self._made[first]


def _join(parts: list[Transitions], nodes: list[int], joining: _Joining, k: int) -> Transitions:
    """Record `k` of the rollout, joined over all chunks; `nodes` has the number of each chunk's first node."""
    states = _starts([len(part.x) for part in parts])

    def tensors(name: str) -> Tensor:
        return joining.joint((k, name), [getattr(part, name) for part in parts])

    return replace(
        parts[0],
        x=tensors("x"),
        velocity=tensors("velocity"),
        prompt=tuple(prompt for part in parts for prompt in part.prompt),
        state=torch.cat([part.state + first for part, first in zip(parts, states)]),
        x_next=tensors("x_next"),
        node=torch.cat([part.node + first for part, first in zip(parts, nodes)]),
        log_prob=torch.cat([part.log_prob for part in parts]),
        batches=tuple(
            slice(batch.start + first, batch.stop + first)
            for part, first in zip(parts, states)
            for batch in part.batches
        ),
        shift=_joined([part.shift for part in parts]),
        token_log_prob=_joined([part.token_log_prob for part in parts]),
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors of all chunks as one tensor; None if the chunks have none."""
    found = [part for part in parts if part is not None]
    return concatenated(found) if found else None


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]
