"""How long the iterations and evaluations of a run take, and what is left of it."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

_RECENT = 20


class Pace:
    """The time left of a run, from what its latest iterations and evaluations took.

    It goes by medians: one iteration for which the machine stood still would spoil a mean for the rest of the run.

    Args:
        total: iterations of the run.
        every: iterations between evaluations; None without any.
        size: of an evaluation, in iterations: how many times as many samples it has. It counts until one was seen.
        now: seconds, of the clock that `iterated` and `evaluated` are told.
    """

    def __init__(self, total: int, every: int | None, size: float, now: float) -> None:
        self.total, self.every, self.size = total, every, size
        self._last = now
        self._iterations: deque[float] = deque(maxlen=_RECENT)
        self._evaluations: deque[float] = deque(maxlen=_RECENT)
        self._between: deque[float] = deque(maxlen=2 * _RECENT)

    def iterated(self, now: float, seconds: float) -> None:
        """An iteration has ended that took so many seconds; what else has passed was checkpoints and records."""
        self._iterations.append(seconds)
        self._between.append(max(now - self._last - seconds, 0.0))
        self._last = now

    def evaluated(self, now: float) -> None:
        """An evaluation has ended."""
        self._evaluations.append(now - self._last)
        self._last = now

    @property
    def iteration(self) -> float | None:
        """Seconds of an iteration; None before the first."""
        return median(self._iterations) if self._iterations else None

    @property
    def evaluation(self) -> float | None:
        """Seconds of an evaluation; None before the first."""
        return median(self._evaluations) if self._evaluations else None

    def evaluates(self, done: int) -> bool:
        """Whether an evaluation follows on so many iterations."""
        return self.every is not None and (done % self.every == 0 or done == self.total)

    def left(self, done: int) -> float:
        """Seconds to the end after so many iterations, of which one at least was seen."""
        iteration = self.iteration or 0.0
        left = (self.total - done) * (iteration + fmean(self._between or [0.0]))
        if self.every is not None:
            known = self.evaluation
            each = self.size * iteration if known is None else known
            left += each * ((self.total - 1) // self.every - (done - 1) // self.every + 1)
        return left
