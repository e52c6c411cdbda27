"""How long the iterations and evaluations of a run take, and how much time is left."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median

_RECENT = 20


class Recurring:
    """An evaluation that a run makes again and again, and how long it takes.

    Args:
        every: iterations between two of them.
        size: samples of the evaluation over samples of an iteration; the estimate until one was timed.
    """

    def __init__(self, every: int, size: float) -> None:
        self.every, self.size = every, size
        self.times: deque[float] = deque(maxlen=_RECENT)

    def due(self, done: int) -> bool:
        """Whether it follows after `done` iterations."""
        return done % self.every == 0

    def count(self, done: int, total: int) -> int:
        """How many follow from now on, before the last iteration."""
        return (total - 1) // self.every - (done - 1) // self.every

    def seconds(self, iteration: float) -> float:
        """Seconds of one, if an iteration takes `iteration` seconds."""
        return median(self.times) if self.times else self.size * iteration


class Pace:
    """The time left of a run, estimated from its latest iterations and evaluations.

    The estimate uses medians, because one iteration during which the machine stood still would spoil a mean.

    Args:
        total: iterations of the run.
        whole: evaluations of all prompts; the last one follows after the last iteration. None if there are none.
        quick: evaluations of a few prompts; None if there are none.
        now: seconds, on the clock of `iterated` and `evaluated`.
    """

    def __init__(self, total: int, whole: Recurring | None, quick: Recurring | None, now: float) -> None:
        self.total, self.whole, self.quick = total, whole, quick
        self._last = now
        self._iterations: deque[float] = deque(maxlen=_RECENT)
        self._between: deque[float] = deque(maxlen=2 * _RECENT)

    def iterated(self, now: float, seconds: float) -> None:
        """Record the end of an iteration that took `seconds`. The rest of the time went to checkpoints and records."""
        self._iterations.append(seconds)
        self._between.append(max(now - self._last - seconds, 0.0))
        self._last = now

    def evaluated(self, now: float, done: int) -> None:
        """Record the end of an evaluation after `done` iterations."""
        if (found := self.evaluation(done)) is not None:
            found.times.append(now - self._last)
        self._last = now

    @property
    def iteration(self) -> float | None:
        """Median seconds of an iteration; None before the first."""
        return median(self._iterations) if self._iterations else None

    def evaluation(self, done: int) -> Recurring | None:
        """The evaluation that follows after `done` iterations, or None."""
        if self.whole is not None and (self.whole.due(done) or done == self.total):
            return self.whole
        return self.quick if self.quick is not None and self.quick.due(done) else None

    def left(self, done: int) -> float:
        """Seconds to the end of the run after `done` iterations; at least one of them must have been recorded."""
        iteration = self.iteration or 0.0
        left = (self.total - done) * (iteration + fmean(self._between or [0.0]))
        if self.whole is not None:
            whole = self.whole.count(done, self.total)
            left += (whole + 1) * self.whole.seconds(iteration)
            if self.quick is not None:
                both = Recurring(math.lcm(self.whole.every, self.quick.every), 0.0).count(done, self.total)
                left += (self.quick.count(done, self.total) - both) * self.quick.seconds(iteration)
        return left
