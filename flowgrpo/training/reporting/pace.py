"""How long the iterations and evaluations of a run take, and how much time is left."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

_RECENT = 20


class Pace:
    """The time left of a run, estimated from its latest iterations and evaluations.

    The estimate uses medians, because one iteration during which the machine stood still would spoil a mean.

    Args:
        total: iterations of the run.
        every: iterations between evaluations; None if there are no evaluations.
        size: samples of an evaluation over samples of an iteration; the estimate until an evaluation was timed.
        now: seconds, on the clock of `iterated` and `evaluated`.
    """

    def __init__(self, total: int, every: int | None, size: float, now: float) -> None:
        self.total, self.every, self.size = total, every, size
        self._last = now
        self._iterations: deque[float] = deque(maxlen=_RECENT)
        self._evaluations: deque[float] = deque(maxlen=_RECENT)
        self._between: deque[float] = deque(maxlen=2 * _RECENT)

    def iterated(self, now: float, seconds: float) -> None:
        """Record the end of an iteration that took `seconds`. The rest of the time went to checkpoints and records."""
        self._iterations.append(seconds)
        self._between.append(max(now - self._last - seconds, 0.0))
        self._last = now

    def evaluated(self, now: float) -> None:
        """Record the end of an evaluation."""
        self._evaluations.append(now - self._last)
        self._last = now

    @property
    def iteration(self) -> float | None:
        """Median seconds of an iteration; None before the first."""
        return median(self._iterations) if self._iterations else None

    @property
    def evaluation(self) -> float | None:
        """Median seconds of an evaluation; None before the first."""
        return median(self._evaluations) if self._evaluations else None

    def evaluates(self, done: int) -> bool:
        """Whether an evaluation follows after `done` iterations."""
        return self.every is not None and (done % self.every == 0 or done == self.total)

    def left(self, done: int) -> float:
        """Seconds to the end of the run after `done` iterations; at least one of them must have been recorded."""
        iteration = self.iteration or 0.0
        left = (self.total - done) * (iteration + fmean(self._between or [0.0]))
        if self.every is not None:
            known = self.evaluation
            each = self.size * iteration if known is None else known
            left += each * ((self.total - 1) // self.every - (done - 1) // self.every + 1)
        return left
