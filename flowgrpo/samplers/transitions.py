"""What a rollout leaves behind: kept, joined of several chunks of prompts, and its trained edges evaluated again.

`replay` evaluates the very batches of the rollout again with gradients, so that the prediction, and with it every
ratio, is the same to the last bit until the weights move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .kernels import Coefficients


def to_host(x: Tensor) -> Tensor:
    """A tensor in host memory: itself if it is there, else a copy, page-locked where a CUDA device will read it."""
    if x.device.type == "cpu":
        return x
    # Waits for the copy: what reads it next may not be the device.
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda").copy_(x)


def brought(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device it is computed with: itself if it waits there."""
    return x.to(device, non_blocking=True)


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat` along the first dimension, page-locked if the parts are."""
    if parts[0].device.type != "cpu" or not parts[0].is_pinned():
        return torch.cat(list(parts))
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return torch.cat(list(parts), out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))


Velocity = Callable[[Tensor, int, Sequence[int]], Tensor]
"""`velocity(x [N, ...], i, prompts [N]) -> [N, ...]`: the prediction at `sigmas[i]` for states of those prompts."""


@dataclass(frozen=True)
class Transitions:
    """The trained edges of one denoising step that share a kernel.

    States may wait on another device than they are computed with (`x`, `velocity`, `x_next`, `shift`).

    Attributes:
        step: index of the denoising step.
        coefficients: its transition.
        x: [S, ...] distinct states the edges start from, storage dtype.
        velocity: [S, ...] what the sampling policy predicted there.
        prompt: [S] prompt of each state, as an index into the prompts that were asked for.
        state: [E] state each edge starts from, in 0..S-1, ascending.
        x_next: [E, ...] where each edge ends, storage dtype.
        node: [E] node id of that end.
        log_prob: [E] mean-reduced log-density of each edge, float32; NaN for a deterministic one.
        shift: [E, ...] what a guide added to the noise of each edge; None without a guide.
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
    shift: Tensor | None = None

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
        prompt: [N] its prompt, 0..P-1; of a chunk those of its own numbers only.
        root: [N] its root's number within the prompt.
        branch: [N] depth at which its side branch left the main line, 0 on the main line.
        stride: [N] how its side branch is finished (`StepPlan.completions`), 1 where that is not decided.
        log_prob: [N] mean-reduced log-density of the edge into it, 0 for a root or a deterministic edge.
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
    stride: Tensor
    log_prob: Tensor
    leaf: Tensor
    x: Tensor
    transitions: tuple[Transitions, ...]
    evaluations: int

    @property
    def leaf_prompt(self) -> Tensor:
        """[L] prompt of each leaf."""
        return self.prompt[self.leaf]


@dataclass(frozen=True)
class ReplayedEdges:
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


def replay(velocity: Velocity, transitions: Transitions, batch: slice) -> ReplayedEdges:
    """Evaluate one recorded batch of states with the present policy, keeping the graph."""
    edges = transitions.edges_of(batch)
    v = velocity(transitions.x[batch], transitions.step, transitions.prompt[batch])
    return ReplayedEdges(transitions, edges, batch, v)


def batches_of(rollout: Rollout) -> Iterator[tuple[Transitions, slice]]:
    """Every recorded batch of trained states, in the order of sampling."""
    for transitions in rollout.transitions:
        for batch in transitions.batches:
            yield transitions, batch


def chunks_of(count: int, size: int | None) -> Iterator[slice]:
    """Ranges of `size` prompts of `count`, the last one maybe shorter; one range of all if `size` is None."""
    for first in range(0, count, size or max(count, 1)):
        yield slice(first, min(first + (size or count), count))


def join_rollouts(chunks: list[Rollout]) -> Rollout:
    """Rollouts of one plan, of prompts that rise from one to the next, as one.

    Nodes are numbered chunk by chunk, and not level by level over all prompts. Everything else is as if all prompts had
    run at once: leaves, states and edges are in the order of their prompts, and the batches of trained states are those
    that were evaluated.

    Args:
        chunks: at least one; emptied, so that the states of one denoising step at a time are twice in memory.
    """
    if len(chunks) == 1:
        return chunks.pop()
    nodes = _starts([len(chunk.parent) for chunk in chunks])
    waiting = [list(chunk.transitions) for chunk in chunks]
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
    )
    chunks.clear()
    # One plan takes the same steps with every prompt, so all chunks have the same transitions.
    steps = len(waiting[0])
    return replace(joint, transitions=tuple(_join([w.pop(0) for w in waiting], nodes) for _ in range(steps)))


def _join(parts: list[Transitions], nodes: list[int]) -> Transitions:
    """The edges of one denoising step of all chunks; `nodes` has the number of each chunk's first node."""
    states = _starts([len(part.x) for part in parts])

    def tensors(name: str) -> Tensor:
        return concatenated([getattr(part, name) for part in parts])

    return replace(
        parts[0],
        x=tensors("x"),
        velocity=tensors("velocity"),
        prompt=tuple(prompt for part in parts for prompt in part.prompt),
        state=torch.cat([part.state + first for part, first in zip(parts, states)]),
        x_next=tensors("x_next"),
        node=torch.cat([part.node + first for part, first in zip(parts, nodes)]),
        log_prob=tensors("log_prob"),
        batches=tuple(
            slice(batch.start + first, batch.stop + first)
            for part, first in zip(parts, states)
            for batch in part.batches
        ),
        shift=None if parts[0].shift is None else tensors("shift"),
    )


def _starts(sizes: list[int]) -> list[int]:
    return [sum(sizes[:k]) for k in range(len(sizes))]
