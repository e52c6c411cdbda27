"""From prompts to samples with scores: one process's share of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from ..configs.schema import AnyRecipe
from ..configs.sections import PROMPT
from ..core.addressing import address
from ..rewards.runner import RewardBatch, RewardSet
from ..weights.averages import Ema
from .credit.pooling import Batch, asked
from .data import Data, PromptRow, templated
from .distributed.processes import Processes
from .extensions.extension import Extensions
from .overlapped_scoring import OverlappedScoring
from .reporting.clock import Clock
from .tasks import Collected, Task
from .uneven_groups import collect_rounds, refuse_comparisons


class Collector:
    """Draws the prompts of an iteration, samples them and has the samples scored.

    Everything random is addressed by `(run seed, iteration, prompt)`.

    Args:
        recipe: how much is sampled, and whether in rounds.
        task: samples.
        rewards: score.
        data: prompts.
        extensions: may draw other prompts.
        processes: of the run, to which prompts are dealt.
        clock: told where the time goes.
        lagging: the policy that samples, where it lags behind the one that is trained.

    Raises:
        ValueError: groups are uneven, and a reward compares whole groups.
    """

    def __init__(
        self,
        recipe: AnyRecipe,
        task: Task,
        rewards: RewardSet,
        data: Data,
        extensions: Extensions,
        processes: Processes,
        clock: Clock,
        lagging: Ema | None = None,
    ) -> None:
        self.recipe, self.task, self.rewards, self.data = recipe, task, rewards, data
        self.extensions, self.processes, self.clock, self.lagging = extensions, processes, clock, lagging
        self.places = processes.share(recipe.rollout.prompts)
        self.cuts = processes.cuts(recipe.rollout.prompts, recipe.optimizer.updates)
        self.uneven = recipe.rollout.budget is not None or bool(recipe.data.templates)
        if self.uneven:
            refuse_comparisons(rewards)

    def rows(self, iteration: int) -> list[PromptRow]:
        """This process's share of the prompts of an iteration."""
        count, stream = self.recipe.rollout.prompts, self.data.train
        drawn = self.extensions.prompts_drawn(stream.take(iteration * count, count), stream.rows, iteration)
        return [drawn[place] for place in self.places]

    def sample(self, iteration: int) -> Batch:
        """This process's share, sampled and scored: in rounds where groups are uneven."""
        with OverlappedScoring(self.rewards, self.task.device) as scoring:
            if self.uneven:
                return self._in_rounds(iteration, scoring)
            rows, experience = self.collect(iteration, scoring)
            with self.clock.part("reward"):
                return Batch(self.places, rows, experience, scoring.scores(*asked(rows, experience)))

    def collect(self, iteration: int, scoring: OverlappedScoring | None = None) -> tuple[list[PromptRow], Any]:
        """One round of this process's share, of whose scores `scoring` may begin some."""
        rows = self.rows(iteration)
        keys = [self._key(iteration, p, 0) for p in range(len(rows))]
        begin = None if scoring is None else partial(_begin, scoring, rows)
        with self.lagging.applied() if self.lagging else nullcontext():
            return rows, self.task.rollout(rows, keys, iteration, self.clock, self.cuts, begin)

    def _in_rounds(self, iteration: int, scoring: OverlappedScoring) -> Batch:
        rows, templates = self.rows(iteration), self.recipe.data.templates or [PROMPT]

        def sampled(prompts: Sequence[int], numbers: Sequence[int]) -> Any:
            keys = [self._key(iteration, p, number) for p, number in zip(prompts, numbers)]
            wrapped = [templated(rows[p], templates[n % len(templates)]) for p, n in zip(prompts, numbers)]
            begin = partial(_begin, scoring, [rows[p] for p in prompts])
            with self.lagging.applied() if self.lagging else nullcontext():
                # Rounds are one optimizer step.
                return self.task.rollout(wrapped, keys, iteration, self.clock, (), begin)

        def scored(part: Collected, prompts: Sequence[int]) -> RewardBatch:
            with self.clock.part("reward"):
                return scoring.scores(*asked([rows[p] for p in prompts], part))

        def pool(numbers: list[float]) -> tuple[list[float], list[int]]:
            return self.processes.pool(numbers, self.places)

        settings = self.recipe.rollout
        found = collect_rounds(settings.budget, len(rows), len(templates), settings.group, sampled, scored, pool)
        return Batch(self.places, rows, *found)

    def _key(self, iteration: int, prompt: int, round_number: int) -> int:
        """What addresses the randomness of a round of one of this process's prompts."""
        seed, number = self.recipe.run.seed, iteration * self.recipe.rollout.prompts + self.places[prompt]
        return address(seed, 1, number) if round_number == 0 else address(seed, 8, number, round_number)


def _begin(scoring: OverlappedScoring, rows: Sequence[PromptRow], chunk: Collected) -> None:
    scoring.begin(*asked(rows, chunk))
