"""All optimizer steps of one rollout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..configs.schema import AnyRecipe
from ..configs.sections import OptimizerConfig
from ..core.diagnostics import COLUMNS
from ..weights.averages import Ema
from .distributed.processes import Processes
from .losses.objective import Objective
from .optimizer import Stepper
from .reporting.clock import Clock
from .reporting.records import joint_update, update_record
from .stopping import Stop
from .tasks import Collected, Task


def averages_of(recipe: AnyRecipe, task: Task) -> dict[str, Ema]:
    """Averages of the trained weights that the recipe asks for, by name: `ema` is that of the results."""
    wanted = {"ema": recipe.optimizer.ema, **task.followers()}
    return {
        name: Ema(task.weights, decay=chosen.decay, every=chosen.every, rise=chosen.rise)
        for name, chosen in wanted.items()
        if chosen is not None
    }


class Updater:
    """Takes the optimizer steps of a rollout, batch by batch.

    Loss normalisers are counts of the whole optimizer step, so processes and micro-batches simply add.

    Args:
        settings: into how many steps a rollout is cut.
        task: what is trained.
        objective: its loss.
        optimizer: moves the weights.
        averages: follow them.
        processes, clock: of the run.
        stop: told before each step; until the first one an iteration may be given up.
    """

    def __init__(
        self,
        settings: OptimizerConfig,
        task: Task,
        objective: Objective,
        optimizer: Stepper,
        averages: Iterable[Ema],
        processes: Processes,
        clock: Clock,
        stop: Stop,
    ) -> None:
        self.settings, self.task, self.objective, self.optimizer = settings, task, objective, optimizer
        self.averages, self.processes, self.clock, self.stop = list(averages), processes, clock, stop

    def update(self, experience: Collected, advantages: Tensor, keep: Tensor | None = None) -> dict[str, Any]:
        """Returns metrics. `advantages` [N] and `keep` [N] (what is trained) are by node."""
        statistics = torch.zeros(experience.columns, 2, COLUMNS, dtype=torch.float64)
        sums: dict[str, Tensor] = {}
        first_error = torch.zeros(())
        norms = []
        settings, objective = self.settings, self.objective
        with self.clock.part(self.task.update_part):
            objective.prepare(experience)
        for step in range(settings.epochs * settings.updates):
            part = step % settings.updates
            rows = torch.tensor(float(objective.rows(experience, part, keep)), device=self.task.device)
            rows = self.processes.add(rows).clamp(min=1.0)
            with self.clock.part(self.task.update_part):
                self._settle(experience, part, advantages, keep)
            for batch in objective.batches(experience, part, keep):
                with self.clock.part(self.task.update_part):
                    outcome = objective.backward(experience, batch, advantages, keep, rows)
                statistics += outcome.statistics
                sums = {name: sums.get(name, 0) + value for name, value in outcome.metrics.items()}
                if step == 0:
                    first_error = torch.maximum(first_error, outcome.error)
            with self.clock.part("optimizer"):
                norms.append(self._step())
        mine = statistics, {name: value.cpu() for name, value in sums.items()}, first_error
        return update_record(*joint_update(self.processes.gather(mine)), norms)

    def _settle(self, experience: Collected, part: int, advantages: Tensor, keep: Tensor | None) -> None:
        """Let the objective know what the step needs to know of the batches of all processes."""
        sums = self.objective.measure(experience, part, advantages, keep)
        if sums is not None:
            self.objective.settle(self.processes.add(sums))

    def _step(self) -> Tensor:
        self.stop.settled()
        norm = self.optimizer.step()
        for average in self.averages:
            average.step()
        return norm
