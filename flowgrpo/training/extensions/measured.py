"""Extensions that share a number of each sample, such as a number that the policy finds in a further pass."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..credit.pooling import Batch, Pooled
from ..distributed.processes import Processes
from ..reporting.clock import Clock
from .extension import Extension

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ..text.text_policy import TextPolicy


class MeasuredSamples(Extension):
    """Shares a number of each sample under the name `column`; the mean of the numbers is the metric `metric`.

    A number may be NaN where there is nothing to measure. The mean leaves it out. If all numbers are NaN, there is no
    metric.
    """

    column: ClassVar[str]
    metric: ClassVar[str]
    _mean: float | None = None

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> None:
        """Keep the mean for the metrics."""
        known = [value for value in samples.columns[self.column] if not math.isnan(value)]
        self._mean = sum(known) / len(known) if known else None

    def record(self) -> dict[str, float]:
        """The mean of the numbers."""
        return {} if self._mean is None else {self.metric: self._mean}


class MeasuredByPolicy(MeasuredSamples):
    """Finds the number of each completion by a further pass of the policy, before the update."""

    def begin(self, task: Any, processes: Processes, clock: Clock) -> None:
        """Take the policy, which scores completions."""
        super().begin(task, processes, clock)
        self.policy: TextPolicy = task.policy
        self.clock, self.part = clock, task.update_part

    def samples_scored(self, batch: Batch) -> Batch:
        """Share the numbers of the completions of this process."""
        with self.clock.part(self.part):
            batch.columns[self.column] = self.measured(batch)
        return batch

    @abstractmethod
    def measured(self, batch: Batch) -> list[float]:
        """[B] the number of each completion of this process."""
