"""A rollout made in several chunks of whole prompts, put together as one call of the executor would have made it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .states import concatenated
from .transitions import Rollout, Transitions


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
