"""From prompts to samples with scores: one process's share of an iteration.

Some rewards run elsewhere, in another process or on a device of their own. They get a chunk of the rollout as soon as
the chunk is decoded, in threads, while the next chunk is sampled. Rewards that share the policy's device or this Python
process are called at the end, with all samples. Beside the sampler, they would slow it down and take its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..configs.schema import AnyRecipe
from ..configs.sections import PROMPT
from ..core.addressing import address
from ..rewards.base import NOISE_KEY, Reward, RewardError
from ..rewards.runner import RewardBatch, RewardSet
from ..rewards.score_batches import join_scores
from ..rewards.threads import Line
from ..weights.averages import Ema
from .credit.pooling import Batch, asked
from .data import Data, PromptRow, templated
from .distributed.context_groups import LedRewards
from .distributed.failures import share_failure
from .distributed.processes import Processes
from .extensions.extension import Extensions
from .recipe_rounds import is_uneven, refuse_comparisons
from .reporting.clock import Clock
from .tasks import Collected, Task
from .uneven_groups import collect_rounds, meets


def runs_elsewhere(reward: Reward, device: torch.device) -> bool:
    """Whether a reward leaves `device`, the policy's device, alone: the reward is remote or has another device."""
    if reward.remote or reward.device is None:
        return reward.remote
    own = torch.device(reward.device)
    same = own.type == device.type and (own.index is None or device.index is None or own.index == device.index)
    return not same


class OverlappedScoring:
    """The scores of one rollout. Rewards that run elsewhere begin before the rollout is complete.

    Each remote reward has a thread of its own. The rewards on one device share a thread, and are called in turn. So no
    reward, and nothing that rewards of one device share, is ever called twice at a time.

    With context parallelism, no reward begins before the rollout is complete, because a group asks together.

    As a context manager, it releases its threads. If the run has failed, it does not wait for remote answers.

    Args:
        rewards: the rewards of the run.
        device: the device of the policy.
    """

    def __init__(self, rewards: RewardSet, device: torch.device) -> None:
        self._rewards = rewards
        apart = [] if isinstance(rewards, LedRewards) else rewards.rewards
        self._elsewhere = [k for k, reward in enumerate(apart) if runs_elsewhere(reward, device)]
        self._lines: dict[int | str, Line] = {}
        self._begun: dict[int, list[Future[RewardBatch]]] = {}
        self._count = 0

    def begin(
        self,
        samples: Tensor | Sequence[str],
        prompts: Sequence[str],
        columns: Mapping[str, Sequence[Any]] | None = None,
        groups: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Start scoring the next samples of the rollout with the rewards that run elsewhere.

        The arguments are those of `scores`. Groups must be whole.

        Raises:
            RewardError: a reward has failed on earlier samples.
        """
        for future in chain.from_iterable(self._begun.values()):
            if future.done():
                future.result()
        for k in self._elsewhere:
            reward = self._rewards.rewards[k]
            place = k if reward.remote else str(reward.device)
            if place not in self._lines:
                self._lines[place] = Line("rewards ahead")
            score = partial(self._rewards.only(k).score, samples, prompts, columns, groups, self._count)
            self._begun.setdefault(k, []).append(self._lines[place].put(score))
        self._count += len(prompts)

    def scores(
        self,
        samples: Tensor | Sequence[str],
        prompts: Sequence[str],
        columns: Mapping[str, Sequence[Any]] | None = None,
        groups: Tensor | Sequence[int] | None = None,
    ) -> RewardBatch:
        """Scores of the whole rollout by every reward.

        Args:
            samples: B samples, see `RewardSet.score`. The samples given to `begin` come first, in their order.
            prompts: B prompts.
            columns: name -> B values.
            groups: B group ids.

        Returns:
            What `RewardSet.score` returns, if no reward depends on which groups share a call.

        Raises:
            ValueError, RewardError, MissingDependency: see `RewardSet.score`.
        """
        begun, rewards = self._begun, self._rewards
        if not begun:
            return rewards.score(samples, prompts, columns, groups)
        places = range(len(rewards.names))
        found = {k: rewards.only(k).score(samples, prompts, columns, groups) for k in places if k not in begun}
        found |= {k: join_scores([future.result() for future in futures]) for k, futures in begun.items()}
        self._begun, self._count = {}, 0
        return side_by_side([found[k] for k in places])

    def __enter__(self) -> OverlappedScoring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in chain.from_iterable(self._begun.values()):
            future.cancel()
        for line in self._lines.values():
            line.end()
        for place, line in self._lines.items():
            if isinstance(place, str):
                # This thread computes in this process, so the process must outlive it.
                line.join()


def side_by_side(columns: Sequence[RewardBatch]) -> RewardBatch:
    """Join the scores that several rewards gave the same samples, one `RewardBatch` a reward."""
    named = ("sub_scores", "notes", "seconds", "answers", "parts", "rendered")
    return replace(
        columns[0],
        values=torch.cat([column.values for column in columns], dim=1),
        names=tuple(name for column in columns for name in column.names),
        weights=torch.cat([column.weights for column in columns]),
        **{kind: {name: found for c in columns for name, found in getattr(c, kind).items()} for kind in named},
    )


class Collector:
    """Draws the prompts of an iteration, samples images or completions for them, and has the samples scored.

    Everything random is addressed by `(run seed, iteration, prompt)`.

    Args:
        recipe: how much is sampled, and whether in rounds.
        task: makes the samples.
        rewards: score the samples.
        data: the prompts.
        extensions: may replace prompts.
        processes: the processes of the run; each gets a share of the prompts.
        clock: measures where the time goes.
        lagging: the policy that samples, if it lags behind the trained policy.

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
        self.uneven = is_uneven(recipe)
        if self.uneven:
            refuse_comparisons(rewards.rewards)

    def rows(self, iteration: int) -> list[PromptRow]:
        """This process's share of the prompts of an iteration."""
        count, stream = self.recipe.rollout.prompts, self.data.train
        drawn = self.extensions.prompts_drawn(stream.take(iteration * count, count), stream.rows, iteration)
        return [drawn[place] for place in self.places]

    def sample(self, iteration: int) -> Batch:
        """Sample and score this process's share of an iteration. Uneven groups are sampled in rounds."""
        self.rewards.keeps_rendered = self.recipe.run.saves_samples(iteration)
        with OverlappedScoring(self.rewards, self.task.device) as scoring:
            if self.uneven:
                return self._in_rounds(iteration, scoring)
            rows, experience = self.collect(iteration, scoring)
            with self.clock.part("reward"):
                return Batch(self.places, rows, experience, scoring.scores(*asked(rows, experience)))

    def collect(self, iteration: int, scoring: OverlappedScoring | None = None) -> tuple[list[PromptRow], Any]:
        """Sample one round of this process's share. `scoring`, if given, starts before the round is complete."""
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

            def begin(chunk: Collected) -> None:
                scoring.begin(*self._asked(rows, prompts, chunk, iteration))

            with self.lagging.applied() if self.lagging else nullcontext():
                # All rounds together are trained in one optimizer step.
                return self.task.rollout(wrapped, keys, iteration, self.clock, (), begin)

        def scored(part: Collected, prompts: Sequence[int]) -> RewardBatch:
            with self.clock.part("reward"):
                return scoring.scores(*self._asked(rows, prompts, part, iteration))

        settings = self.recipe.rollout
        waited_for = meets(settings.budget)

        def pool(numbers: list[float]) -> tuple[list[float], list[int]]:
            nonlocal waited_for
            waited_for = False
            share_failure(self.processes)
            return self.processes.pool(numbers, self.places)

        try:
            found = collect_rounds(settings.budget, len(rows), len(templates), settings.group, sampled, scored, pool)
        except RewardError as error:
            if waited_for:
                share_failure(self.processes, error)
            raise
        return Batch(self.places, rows, *found)

    def _asked(self, rows: Sequence[PromptRow], prompts: Sequence[int], part: Collected, iteration: int) -> Any:
        """The arguments of the rewards for samples of one round; see `pooling.asked`.

        Samples of all rounds are compared, so they all have the key of the first round for noise of a reward's own.
        """
        samples, texts, columns, groups = asked([rows[p] for p in prompts], part)
        if NOISE_KEY in columns:
            columns[NOISE_KEY] = [self._key(iteration, prompts[own], 0) for own in part.prompt_of_sample]
        return samples, texts, columns, groups

    def _key(self, iteration: int, prompt: int, round_number: int) -> int:
        """The address of the randomness of one prompt in one round."""
        seed, number = self.recipe.run.seed, iteration * self.recipe.rollout.prompts + self.places[prompt]
        return address(seed, 1, number) if round_number == 0 else address(seed, 8, number, round_number)


def _begin(scoring: OverlappedScoring, rows: Sequence[PromptRow], chunk: Collected) -> None:
    scoring.begin(*asked(rows, chunk))
