"""Several rollouts that are scored and trained as one rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..text.cutting import Parts
from .losses.objective import Objective, Outcome

if TYPE_CHECKING:
    from ..pipelines.experience import Scouted
    from .tasks import Collected

Samples: TypeAlias = Tensor | list[str] | list[Tensor]
"""L images of one size as a tensor; L images of several sizes, or L completions, as a list."""
ADDED = ("evaluations", "tokens", "samples")
LARGEST = ("rounds",)


@dataclass(frozen=True)
class JoinedRollouts(ABC):
    """Several rollouts of P prompts together. Samples and nodes are in the order of the rollouts.

    Attributes:
        rounds: the rollouts.
        prompts: for each rollout, the index 0..P-1 of the prompt of each entry.
    """

    rounds: tuple[Collected, ...]
    prompts: tuple[tuple[int, ...], ...]

    @property
    @abstractmethod
    def kinds(self) -> tuple[Hashable, ...]:
        """What distinguishes the rollouts; rollouts of one kind have one objective."""

    @property
    @abstractmethod
    def groups(self) -> Tensor:
        """[L] ids of the groups in which samples are compared."""

    @abstractmethod
    def siblings(self, among: str) -> Tensor:
        """[L] ids of the sets within which samples are selected."""

    @cached_property
    def samples(self) -> Samples:
        """Samples, rollout by rollout."""
        return joined([part.samples for part in self.rounds])

    @cached_property
    def prompt_of_sample(self) -> list[int]:
        """[L] index of the prompt of each sample."""
        return [of[entry] for part, of in zip(self.rounds, self.prompts) for entry in part.prompt_of_sample]

    @property
    def lengths(self) -> Tensor | None:
        """[L] tokens; for completions only."""
        return _known([part.lengths for part in self.rounds])

    @property
    def log_probs(self) -> Tensor | None:
        """[L] log-probs of whole samples under the sampler; for completions only."""
        return _known([part.log_probs for part in self.rounds])

    @property
    def scouted(self) -> tuple[Scouted, ...]:
        """What the scouts of the prompts have found, rollout by rollout."""
        return tuple(one for part in self.rounds for one in part.scouted)

    @property
    def parts(self) -> Parts | None:
        """The parts of completions; None if the recipe does not cut them."""
        cut = [part.parts for part in self.rounds]
        known = [part for part in cut if part is not None]
        if len(known) < len(cut):
            return None
        return Parts([texts for part in known for texts in part.texts], [ids for part in known for ids in part.ids])

    def given(self) -> dict[str, list[Any]]:
        """Name -> L values that rewards get beside the columns of the prompts, rollout by rollout."""
        each = [part.given() for part in self.rounds]
        names = [name for name in each[0] if all(name in one for one in each)]
        return {name: [value for one in each for value in one[name]] for name in names}

    @property
    def outcomes(self) -> Tensor:
        """[L] bool: samples that are results, not previews of a state."""
        return torch.cat([part.outcomes for part in self.rounds])

    @property
    def columns(self) -> int:
        """Columns of the statistics of the ratio, the same in each rollout."""
        return self.rounds[0].columns

    def record(self) -> dict[str, float]:
        """Sums or means of the metrics of the rollouts."""
        return joint_record([part.record() for part in self.rounds], self.sizes)

    def origins(self) -> list[dict[str, Any]]:
        """[L] how each sample was made, rollout by rollout."""
        return [origin for part in self.rounds for origin in part.origins()]

    def node_advantages(self, leaf: Tensor) -> Tensor:
        """[N] advantages of the nodes, rollout by rollout."""
        return torch.cat([part.node_advantages(own) for part, own in zip(self.rounds, leaf.split(self.sizes))])

    def kept(self, chosen: Tensor) -> Tensor:
        """[N] bool: nodes that are trained, rollout by rollout."""
        return torch.cat([part.kept(own) for part, own in zip(self.rounds, chosen.split(self.sizes))])

    def mark(self, name: str, values: Tensor) -> None:
        """Leave values [N] of the nodes for penalties, under a name; each rollout gets those of its nodes."""
        for part, nodes in zip(self.rounds, self.nodes):
            # Only rollouts of images have marks.
            part.mark(name, values[nodes])  # type: ignore[attr-defined]

    @cached_property
    def nodes(self) -> list[slice]:
        """The places of the nodes of each rollout among all nodes."""
        sizes = [len(part.kept(torch.ones(n, dtype=torch.bool))) for part, n in zip(self.rounds, self.sizes)]
        return [slice(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))]

    @property
    def sizes(self) -> list[int]:
        """Number of samples of each rollout."""
        return [len(part.prompt_of_sample) for part in self.rounds]


class JoinedObjective:
    """The objective of a task over joined rollouts. An optimizer step takes all of them together.

    Args:
        make: makes the objective of the rollouts of a kind.
    """

    def __init__(self, make: Callable[[Any], Objective]) -> None:
        self._make = make
        self._made: dict[Hashable, Objective] = {}

    def _each(self, experience: JoinedRollouts) -> list[Objective]:
        """The objective of each rollout."""
        for kind in experience.kinds:
            if kind not in self._made:
                self._made[kind] = self._make(kind)
        return [self._made[kind] for kind in experience.kinds]

    def prepare(self, experience: JoinedRollouts) -> None:
        """Let the objective of each rollout compute what it needs before the weights move."""
        for objective, part in zip(self._each(experience), experience.rounds):
            objective.prepare(part)

    def measure(self, experience: JoinedRollouts, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """Sums over all rollouts that an optimizer step needs before its first batch; None if it needs none."""
        parts = zip(self._each(experience), experience.rounds, experience.nodes)
        found = [each.measure(one, part, advantages[nodes], _own(keep, nodes)) for each, one, nodes in parts]
        sums = [one for one in found if one is not None]
        return torch.stack(sums).sum(0) if sums else None

    def settle(self, sums: Tensor) -> None:
        """Give the objective of each rollout the same sums."""
        for objective in self._made.values():
            objective.settle(sums)

    def rows(self, experience: JoinedRollouts, part: int, keep: Tensor | None) -> int:
        """Rows of all rollouts."""
        parts = zip(self._each(experience), experience.rounds, experience.nodes)
        return sum(objective.rows(one, part, _own(keep, nodes)) for objective, one, nodes in parts)

    def batches(self, experience: JoinedRollouts, part: int, keep: Tensor | None) -> Iterator[tuple[int, Any]]:
        """The batches of each rollout, with the number of the rollout."""
        for k, (one, nodes) in enumerate(zip(experience.rounds, experience.nodes)):
            for batch in self._each(experience)[k].batches(one, part, _own(keep, nodes)):
                yield k, batch

    def backward(
        self, experience: JoinedRollouts, batch: tuple[int, Any], advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of a batch of one rollout."""
        k, inner = batch
        nodes = experience.nodes[k]
        return self._each(experience)[k].backward(
            experience.rounds[k], inner, advantages[nodes], _own(keep, nodes), rows
        )


def joint_record(records: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """Join the records of several rollouts into one: counts are added, other values are averaged over samples.

    Args:
        records: one for each rollout, see `Collected.record`. A name that a record lacks counts as 0.
        sizes: number of samples of each rollout.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name, 0.0) for record in records]
        if name in LARGEST:
            found[name] = max(values)
        elif name in ADDED:
            found[name] = sum(values)
        else:
            found[name] = sum(value * (size / sum(sizes)) for value, size in zip(values, sizes))
    return found


def joined(samples: Sequence[Samples]) -> Samples:
    """The samples of several rollouts together: images of one size as a tensor, other samples as a list."""
    images = [part for part in samples if isinstance(part, Tensor)]
    if len(images) == len(samples) and len({part.shape[1:] for part in images}) == 1:
        return torch.cat(images)
    return [sample for part in samples for sample in part]


def _known(columns: Sequence[Tensor | None]) -> Tensor | None:
    """The columns of several rollouts as one column; None if the rollouts have no such column."""
    known = [column for column in columns if column is not None]
    return torch.cat(known) if known else None


def _own(keep: Tensor | None, nodes: slice) -> Tensor | None:
    return None if keep is None else keep[nodes]
