"""Evaluations of a run: how they are made, saved and reported, and whether one of them ends the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from ..core.addressing import address
from ..rewards.runner import RewardSet
from ..weights.averages import Ema
from .credit.pooling import Batch, asked
from .data import PromptRow
from .distributed.processes import Processes
from .extensions.extension import Evaluation, Extensions
from .folder.keeping import Keeper
from .folder.saved_samples import save_samples
from .reporting.clock import Clock
from .reporting.records import number, reward_means, standard_errors
from .reporting.reporter import Reporter
from .reporting.symptoms import Symptoms, marks
from .tasks import Task

EVALUATION_SEED = 20_260_101


def evaluation_key(row: PromptRow) -> int:
    """The address of the randomness of a held-out prompt; it is the same in every evaluation."""
    return address(EVALUATION_SEED, 2, row.id)


def evaluated(
    task: Task, heldout: Sequence[PromptRow], rewards: RewardSet, ema: Ema | None, processes: Processes, clock: Clock
) -> tuple[Batch | None, dict[str, float | None]]:
    """Samples held-out prompts with fixed seeds and averaged weights.

    Returns:
        The samples of this process, and the means over all processes with their standard errors.
    """
    places = processes.share(len(heldout))
    rows = [heldout[place] for place in places]
    keys = [evaluation_key(row) for row in rows]
    batch, mine, numbers = None, [], []
    if rows:
        with ema.applied() if ema else nullcontext():
            experience = task.evaluation(rows, keys, clock)
        batch = Batch(places, rows, experience, rewards.score(*asked(rows, experience)))
        numbers = batch.owners
        mine = list(zip(numbers, batch.scores.values.tolist()))
    owners, values = zip(*processes.pool(mine, numbers)[0])
    means, errors = reward_means(torch.tensor(values)), standard_errors(torch.tensor(values), torch.tensor(owners))
    record = {f"eval/{name}": number(mean) for name, mean in zip(rewards.names, means)}
    return batch, record | {f"eval_error/{name}": number(error) for name, error in zip(rewards.names, errors)}


class Evaluations:
    """Samples every held-out prompt with fixed seeds, with the averaged weights.

    Args:
        task: makes the samples.
        heldout: prompts; if empty, there are no evaluations.
        rewards: score the samples.
        average: the averaged weights; None if the run has none.
        clock, symptoms, extensions: of the run.
        keeper: writes the checkpoint if an evaluation ends the run; has the folder, the processes and the reporter.
    """

    def __init__(
        self,
        task: Task,
        heldout: Sequence[PromptRow],
        rewards: RewardSet,
        average: Ema | None,
        clock: Clock,
        symptoms: Symptoms,
        extensions: Extensions,
        keeper: Keeper,
    ) -> None:
        self.task, self.heldout, self.rewards, self.average = task, heldout, rewards, average
        self.clock, self.symptoms, self.extensions, self.keeper = clock, symptoms, extensions, keeper

    @property
    def _reporter(self) -> Reporter:
        return self.keeper.reporter

    def make(self, iteration: int) -> dict[str, float | None]:
        """Make an evaluation before an iteration and save its samples; returns its metrics."""
        if not self.heldout:
            return {}
        keeper = self.keeper
        batch, record = evaluated(
            self.task, self.heldout, self.rewards, self.average, keeper.processes, self.clock
        )  # fmt: skip
        save_samples(batch, "eval", iteration, keeper.run, keeper.processes, keeper.accelerator)
        self._reporter.evaluation(iteration, {name: v for name, v in record.items() if name.startswith("eval/")})
        symptoms = self.symptoms.evaluation(record)
        for symptom in symptoms:
            self._reporter.symptom(symptom)
        return record | marks(symptoms)

    def ends(self, iteration: int, record: dict[str, float | None], last: int) -> bool:
        """Tell the extensions the results; returns whether one of them ends the run before its last iteration.

        If so, the checkpoint holds the states of the extensions before the evaluation, because a resumed run repeats
        the evaluation.

        Args:
            iteration: iterations done before the evaluation.
            record: the metrics of the evaluation; alarms are added to them.
            last: the number of iterations of the run.
        """
        if not record:
            return False
        before = self.extensions.kept()
        means = {name.removeprefix("eval/"): v for name, v in record.items() if name.startswith("eval/")}
        evaluation = Evaluation(iteration, means)
        self.extensions.evaluation_done(evaluation)
        for alarm in evaluation.alarms:
            self._reporter.alarm(alarm)
        record |= {alarm.metric: 1.0 for alarm in evaluation.alarms}
        ended = iteration < last and any(alarm.ends for alarm in evaluation.alarms)
        if ended:
            self.keeper.write(iteration, before)
            if self.keeper.accelerator.is_main_process:
                self.keeper.run.log({"iteration": iteration, **record})
        return ended
