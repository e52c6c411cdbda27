"""A control: the same run, with rewards that say nothing about the samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...core.addressing import address
from ...parts.choice import Choice
from ...parts.needs import needs, one_round
from ...parts.ranges import Given
from ..credit.pooling import Batch
from .extension import Extension
from .rules import once

_DRAWS = 12


def _scores_whole_samples(recipe: Any, choice: Choice) -> list[str]:
    if getattr(recipe, "parts", None) is None:
        return []
    return ["extension shuffle moves the scores of whole completions, and `parts` scores their parts; leave one out"]


@needs(once, one_round("moves scores among the samples of a prompt"), _scores_whole_samples)
class Shuffle(Extension):
    """Deals the scores of each group out to its samples at random: a control.

    What a run still gains with it comes from the loss, the selection or the sampler, and not from the rewards. Language
    models gained on benchmarks with random rewards (Shao et al., "Spurious Rewards", 2506.10947). All scores of a
    sample move together, and every group keeps its scores. So only which sample has which scores is left to chance.
    Evaluations have the true scores. Metrics and the gallery have the moved ones for training samples. Extensions that
    come before it see the true scores. Forms and budgets that ask the rewards themselves see them, too.

    The draws depend on the run seed, the iteration and the place of the prompt in it.
    """

    def __init__(self, *, recipe: Given[Any]) -> None:
        self._seed = recipe.run.seed

    def samples_scored(self, batch: Batch) -> Batch:
        """Move the scores within the groups; only results have scores to move."""
        rows = list(range(len(batch.scores.values)))
        owners, groups, outcomes = batch.owners, batch.experience.groups, batch.experience.outcomes
        members: dict[tuple[int, int], list[int]] = {}
        for row in rows:
            if outcomes[row]:
                members.setdefault((owners[row], int(groups[row])), []).append(row)
        counts: dict[int, int] = {}
        for (owner, _), mine in members.items():
            number = counts[owner] = counts.get(owner, -1) + 1
            generator = np.random.default_rng(address(self._seed, _DRAWS, self.iteration, owner, number))
            for row, other in zip(mine, generator.permutation(mine).tolist(), strict=True):
                rows[row] = other
        return replace(batch, scores=batch.scores.taken(rows))
