"""The samples of all processes of a run together, for comparisons beyond a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...rewards.runner import RewardBatch
from ..data import PromptRow, columns_of
from .strata import Stratum, stratum_ids, stratum_values

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ..distributed.processes import Processes
    from ..tasks import Collected

DIVERGENCE = "divergence"
"""The name of the column that says how far the policy has moved since it last saw the prompt of a sample."""


def asked(rows: Sequence[PromptRow], experience: Collected) -> tuple[Any, list[str], dict[str, list[Any]], Tensor]:
    """The arguments of the rewards for a rollout of the prompts: samples, texts, columns and groups."""
    owners = [rows[p] for p in experience.prompt_of_sample]
    # A chunk may have only prompts that lack a column of the others.
    columns = columns_of(owners, experience.given(), rows)
    return experience.samples, [row.text for row in owners], columns, experience.groups


@dataclass(frozen=True)
class Batch:
    """Prompts of one process with their samples and scores.

    Attributes:
        places: the number of each prompt among the prompts of all processes.
        rows: the prompts, in the order of `places`.
        experience: the samples; a `Collected` with the further members of its task.
        scores: of the samples.
        columns: name -> a value for each sample that all processes should know; extensions fill it.
    """

    places: Sequence[int]
    rows: Sequence[PromptRow]
    experience: Any
    scores: RewardBatch
    columns: dict[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def owners(self) -> list[int]:
        """The number of the prompt of each sample."""
        return [self.places[p] for p in self.experience.prompt_of_sample]


@dataclass(frozen=True)
class Pooled:
    """L samples in the order of their prompts, the same on every process.

    Attributes:
        scores: [L, K], without sub-scores, notes, answers, parts and images.
        prompts: [L] ids of the prompts, which stay the same over the run.
        groups: [L] ids of the groups in which samples are compared.
        outcomes: [L] bool: samples that are results.
        lengths: [L] tokens; for completions only.
        log_probs: [L] log-probs of whole samples under the sampler; for completions only.
        strata: [L] ids of strata; None where the recipe has no strata.
        mine: the places of the samples of this process.
        columns: name -> [L] values that extensions share.
    """

    scores: RewardBatch
    prompts: list[int]
    groups: Tensor
    outcomes: Tensor
    lengths: Tensor | None
    log_probs: Tensor | None
    strata: Tensor | None
    mine: list[int]
    columns: Mapping[str, list[Any]] = field(default_factory=dict)

    @property
    def divergence(self) -> Tensor | None:
        """[L] how far the policy has moved since it last saw the prompt, NaN for a new prompt; None if not measured."""
        found = self.columns.get(DIVERGENCE)
        return None if found is None else torch.tensor(found, dtype=torch.float64)


def pooled(
    processes: Processes,
    places: Sequence[int],
    rows: Sequence[PromptRow],
    experience: Collected,
    scores: RewardBatch,
    stratum: Stratum | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> Pooled:
    """Bring the samples of all processes together. Every process must call it.

    Args:
        processes: of the run.
        places: [P] number of each prompt of this process among the prompts of the iteration.
        rows: [P] prompts of this process.
        experience: samples of these prompts.
        scores: of the samples.
        stratum: what divides samples into strata, if anything does.
        columns: name -> values of the samples that extensions share; the same names on every process.

    Raises:
        ValueError: a reward lacks the sub-score that `stratum` names.
    """
    owners, lengths, chances = experience.prompt_of_sample, experience.lengths, experience.log_probs
    shared = columns or {}
    own = (
        [places[p] for p in owners],
        [rows[p].id for p in owners],
        experience.groups.tolist(),
        experience.outcomes.tolist(),
        [0] * len(owners) if lengths is None else lengths.tolist(),
        [0.0] * len(owners) if chances is None else chances.tolist(),
        scores.values.tolist(),
        [0.0] * len(owners) if stratum is None else stratum_values(scores, stratum),
        list(zip(*shared.values(), strict=True)) if shared else [()] * len(owners),
    )
    everything, mine = processes.pool(list(zip(*own, strict=True)), own[0])
    at, ids, groups, outcomes, counts, likely, values, kinds, found = zip(*everything, strict=True)
    # Each process numbers its groups by itself, so the pair of prompt and group is unique. No group has two prompts.
    names: dict[tuple[int, int], int] = {}
    known = [names.setdefault(pair, len(names)) for pair in zip(at, groups)]
    return Pooled(
        scores=replace(
            scores,
            values=torch.tensor(values),
            sub_scores={},
            notes={},
            parts={},
            answers={},
            rendered={},
        ),
        prompts=list(ids),
        groups=torch.tensor(known),
        outcomes=torch.tensor(outcomes),
        lengths=None if lengths is None else torch.tensor(counts),
        log_probs=None if chances is None else torch.tensor(likely, dtype=torch.float64),
        strata=None if stratum is None else stratum_ids(kinds, stratum.edges),
        mine=mine,
        columns=dict(zip(shared, map(list, zip(*found)))),
    )
