"""Rollouts of prompts of several sizes: one rollout for each size, scored and trained as one rollout.

A batch of the denoiser holds one shape, and the noise levels of many pipelines depend on the size. So each size has a
denoiser, a plan and a rollout of its own. All sizes share the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...pipelines.policy import FlowPolicy
from ..joined_rollouts import JoinedRollouts
from ..prompts.prompt_rows import PromptRow, Size

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class SizedPolicies:
    """The policy of each size. A policy is made when the first prompt of its size comes.

    Args:
        own: the policy of prompts without a size, which the arguments of the pipeline's call decide.
        make: makes the policy of a size.
    """

    def __init__(self, own: FlowPolicy, make: Callable[[Size], FlowPolicy]) -> None:
        self._own, self._make = own, make
        self._made: dict[Size, FlowPolicy] = {}

    def of(self, size: Size | None) -> FlowPolicy:
        """The policy of a size."""
        if size is None:
            return self._own
        if size not in self._made:
            self._made[size] = self._make(size)
        # Penalties compare with the reference of the run, whichever policy scores.
        self._made[size].reference = self._own.reference
        return self._made[size]


def by_size(sizes: Sequence[K]) -> Iterator[tuple[K, list[int]]]:
    """Each size, or other kind of prompts, with the numbers of its prompts, in the order of first use."""
    places: dict[K, list[int]] = {}
    for place, size in enumerate(sizes):
        places.setdefault(size, []).append(place)
    yield from places.items()


def sizes_of(rows: Sequence[PromptRow]) -> list[Size | None]:
    """The size of each prompt."""
    return [row.size for row in rows]


def chosen(values: Sequence[T], places: Sequence[int]) -> list[T]:
    """Some of the values."""
    return [values[place] for place in places]


def own_cuts(cuts: Sequence[int], places: Sequence[int]) -> tuple[int, ...]:
    """The first prompt of each part after the first among the prompts of one size.

    Args:
        cuts: the first prompt of each part after the first, among all prompts.
        places: numbers of the prompts of this size, ascending.
    """
    return tuple(sum(place < cut for place in places) for cut in cuts)


@dataclass(frozen=True)
class SizedRollout(JoinedRollouts):
    """Rollouts of P prompts, one for each size, or for each size and window.

    Attributes:
        kinds: the size of each rollout, or its size and its window; rollouts of one kind have one objective.
    """

    kinds: tuple[Hashable, ...] = ()

    @cached_property
    def groups(self) -> Tensor:
        """[L] ids of groups, which the rollouts do not share."""
        return _apart([part.groups for part in self.rounds])

    def siblings(self, among: str) -> Tensor:
        """[L] ids of the sets within which samples are selected; a set is within one rollout."""
        return _apart([part.siblings(among) for part in self.rounds])


def _apart(ids: Sequence[Tensor]) -> Tensor:
    """Ids of several rollouts, each raised above the ids of the rollouts before it."""
    found: list[Tensor] = []
    for own in ids:
        found.append(own + (int(found[-1].max()) + 1 if found and len(found[-1]) else 0))
    return torch.cat(found)


def sized_rollout(parts: Sequence[tuple[Hashable, Sequence[int], Any]]) -> SizedRollout:
    """Join rollouts.

    Args:
        parts: for each kind of prompts, the numbers of its prompts, and their rollout.
    """
    return SizedRollout(
        tuple(part for *_, part in parts),
        tuple(tuple(places) for _, places, _ in parts),
        tuple(size for size, *_ in parts),
    )
