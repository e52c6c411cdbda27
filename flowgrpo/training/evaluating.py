"""Evaluations of a run: how they are made, saved and reported, and whether one of them ends the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..configs.sections import HeldOutConfig
from ..core.addressing import address
from ..rewards.runner import RewardSet
from ..weights.averages import Ema
from .credit.pooling import Batch, asked
from .data import PromptRow
from .extensions.extension import Evaluation, Extensions
from .folder.keeping import Keeper
from .folder.saved_samples import save_samples
from .prompts.chosen_prompts import places_of
from .reporting.clock import Clock
from .reporting.records import number, reward_means, standard_errors
from .reporting.reporter import Reporter
from .reporting.symptoms import Symptoms, marks
from .tasks import Task
from .together import together

EVALUATION_SEED = 20_260_101


def evaluation_key(row: PromptRow) -> int:
    """The address of the randomness of a held-out prompt; it is the same in every evaluation."""
    return address(EVALUATION_SEED, 2, row.id)


@dataclass(frozen=True)
class Scored:
    """The scores of an evaluation, over all processes.

    Attributes:
        names: K rewards.
        owners: [L] number of the held-out prompt of each sample.
        values: [L, K].
    """

    names: Sequence[str]
    owners: Tensor
    values: Tensor

    def of(self, prompts: Sequence[int]) -> Scored:
        """The scores of these prompts alone. The prompts get new numbers from 0 on, in rising order."""
        mine = torch.isin(self.owners, torch.tensor(prompts))
        return Scored(self.names, torch.searchsorted(torch.tensor(prompts), self.owners[mine]), self.values[mine])

    def by_prompt(self) -> Tensor:
        """[P, K] means of each prompt, in the order of the prompts."""
        return torch.stack([reward_means(self.values[self.owners == owner]) for owner in self.owners.unique()])

    def record(self, kind: str) -> dict[str, float | None]:
        """Metrics `KIND/NAME`, the means, and `KIND_error/NAME`, their standard errors."""
        means, errors = reward_means(self.values), standard_errors(self.values, self.owners)
        record = {f"{kind}/{name}": number(mean) for name, mean in zip(self.names, means)}
        return record | {f"{kind}_error/{name}": number(error) for name, error in zip(self.names, errors)}


def evaluated(
    task: Task, heldout: Sequence[PromptRow], rewards: RewardSet, ema: Ema | None, keeper: Keeper, clock: Clock
) -> tuple[Batch | None, Scored]:
    """Samples held-out prompts with fixed seeds and averaged weights.

    Returns:
        The samples of this process, and the scores of all processes.

    Raises:
        Abandoned: a process has received a signal.
    """
    places = keeper.processes.share(len(heldout))
    rows = [heldout[place] for place in places]
    keys = [evaluation_key(row) for row in rows]

    def share() -> Batch | None:
        if not rows:
            return None
        with ema.applied() if ema else nullcontext():
            experience = task.evaluation(rows, keys, clock)
        return Batch(places, rows, experience, rewards.score(*asked(rows, experience)))

    batch = together(keeper, share)
    numbers = [] if batch is None else batch.owners
    mine = [] if batch is None else list(zip(numbers, batch.scores.values.tolist()))
    owners, values = zip(*keeper.processes.pool(mine, numbers)[0])
    return batch, Scored(rewards.names, torch.tensor(owners), torch.tensor(values))


class Evaluations:
    """Samples held-out prompts with fixed seeds, with the averaged weights: all of them, or quickly a few of them.

    Args:
        settings: of the evaluations.
        last: number of iterations of the run; an evaluation of all prompts follows them.
        task: makes the samples.
        heldout: prompts; if empty, there are no evaluations.
        rewards: score the samples.
        average: the averaged weights; None if the run has none.
        clock, symptoms, extensions: of the run.
        keeper: writes the checkpoint if an evaluation ends the run; has the folder, the processes and the reporter.
    """

    def __init__(
        self,
        settings: HeldOutConfig,
        last: int,
        task: Task,
        heldout: Sequence[PromptRow],
        rewards: RewardSet,
        average: Ema | None,
        clock: Clock,
        symptoms: Symptoms,
        extensions: Extensions,
        keeper: Keeper,
    ) -> None:
        self.settings, self.last = settings, last
        self.task, self.heldout, self.rewards, self.average = task, heldout, rewards, average
        self.clock, self.symptoms, self.extensions, self.keeper = clock, symptoms, extensions, keeper
        self._start: Tensor | None = None
        few = settings.quick.prompts if settings.quick is not None else 0
        self._places = places_of(len(heldout), few, settings.take)
        self._few = [heldout[place] for place in self._places]

    @property
    def _reporter(self) -> Reporter:
        return self.keeper.reporter

    def make(self, iteration: int) -> dict[str, float | None]:
        """Make the evaluation that is due before an iteration, if there is one; returns its metrics.

        The samples of an evaluation of all prompts are saved.
        """
        settings, quick = self.settings, self.settings.quick
        whole = iteration % settings.every == 0 or iteration in (self.last, *self.keeper.former_ends)
        if not self.heldout or not (whole or (quick is not None and iteration % quick.every == 0)):
            return {}
        rows = self.heldout if whole else self._few
        keeper, record = self.keeper, dict[str, float | None]()
        self.rewards.keeps_rendered = whole
        batch, scored = evaluated(self.task, rows, self.rewards, self.average, keeper, self.clock)
        if whole:
            save_samples(batch, "eval", iteration, keeper.run, keeper.processes, keeper.trackers)
            record |= scored.record("eval")
        if quick is not None:
            record |= self._quick(scored.of(self._places) if whole else scored, iteration)
        self._reporter.evaluation(iteration, record)
        symptoms = self.symptoms.evaluation(record)
        for symptom in symptoms:
            self._reporter.symptom(symptom)
        return record | marks(symptoms)

    def _quick(self, scored: Scored, iteration: int) -> dict[str, float | None]:
        """Metrics of the few prompts, with the gain since the start; its error is of the differences by prompt."""
        record = scored.record("quick")
        if iteration == 0:
            self._start = scored.by_prompt()
        elif self._start is None and not self.keeper.alike_since:
            self._start = self._saved_start(scored)
        if iteration == 0 or self._start is None:
            return record
        gained = Scored(scored.names, scored.owners.unique(), scored.by_prompt() - self._start)
        return record | gained.record("quick_gain")

    def _saved_start(self, scored: Scored) -> Tensor | None:
        """[P, K] as `Scored.by_prompt`, from the saved samples of the first evaluation; None if they are not there."""
        numbers = {self._few[place].id: place for place in scored.owners.unique().tolist()}
        owners, values = [], []
        for record in self.keeper.run.read_index():
            if record["phase"] == "eval" and record["iteration"] == 0 and record["prompt_id"] in numbers:
                owners.append(numbers[record["prompt_id"]])
                found = (record["rewards"].get(name) for name in scored.names)
                values.append([math.nan if value is None else value for value in found])
        start = Scored(scored.names, torch.tensor(owners), torch.tensor(values))
        return start.by_prompt() if len(start.owners.unique()) == len(numbers) else None

    def ends(self, iteration: int, record: dict[str, float | None]) -> bool:
        """Tell the extensions the results; returns whether one of them ends the run before its last iteration.

        If so, the checkpoint holds the states of the extensions before the evaluation, because a resumed run repeats
        the evaluation.

        Args:
            iteration: iterations done before the evaluation.
            record: the metrics of the evaluation; alarms are added to them.
        """
        means = {name.removeprefix("eval/"): v for name, v in record.items() if name.startswith("eval/")}
        if not means:
            return False
        before = self.extensions.kept()
        evaluation = Evaluation(iteration, means)
        self.extensions.evaluation_done(evaluation)
        for alarm in evaluation.alarms:
            self._reporter.alarm(alarm)
        record |= {alarm.metric: 1.0 for alarm in evaluation.alarms}
        ended = iteration < self.last and any(alarm.ends for alarm in evaluation.alarms)
        if ended:
            self.keeper.write(iteration, before)
            self.keeper.log({"iteration": iteration, **record})
        return ended
