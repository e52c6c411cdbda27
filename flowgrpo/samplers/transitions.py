"""What a rollout leaves behind, and its trained edges evaluated again.

`replay` evaluates the very batches of the rollout again with gradients, so that the prediction, and with it every
ratio, is the same to the last bit until the weights move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels import Coefficients

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
