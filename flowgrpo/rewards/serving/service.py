"""One scoring at a time, with a bounded queue in front of it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from ..base import InvalidScores, Reward, Scores
from ..inputs import Inputs
from ..within import score_within
from .metrics import Metrics


class Full(Exception):
    """As many requests as there may be are being scored or waiting."""


class Stopping(Exception):
    """The service ends; it finishes what it was given before."""


class RequestAbandoned(Exception):
    """Whoever asked is gone."""


@dataclass(frozen=True)
class _Job:
    inputs: Inputs
    abandoned: Callable[[], bool]
    result: Future[Scores]


class Service:
    """Calls a reward in the thread that runs it, for requests that come from others.

    Rewards are made for one thread: models, databases and processes that they hold are used from where they were
    made. Requests are scored in the order in which they came in whole.

    Args:
        reward: what is called.
        waiting: most requests that wait for the one that is scored.
        report: told of failures, one line each.
        clock: seconds, for the metrics.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        waiting: int = 4,
        report: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if isinstance(waiting, bool) or not isinstance(waiting, int) or waiting < 0:
            raise ValueError(f"waiting is {waiting!r}; give a whole number of 0 or more")
        self.reward, self.waiting, self.metrics = reward, waiting, Metrics(reward.name)
        self._report, self._clock = report, clock
        # Putting into it is safe within a signal handler, which `queue.Queue` is not.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._admitted = 0
        self._stopping = self._ended = False

    @property
    def stopping(self) -> bool:
        """Whether the service was asked to end."""
        return self._stopping

    @property
    def admitted(self) -> int:
        """Requests that are read, waiting or scored now."""
        return self._admitted

    @contextmanager
    def admit(self) -> Iterator[None]:
        """A place for one request, from before it is read until it is answered.

        Raises:
            Full: there is none.
            Stopping: the service ends.
        """
        with self._lock:
            if self._stopping or self._ended:
                raise Stopping
            if self._admitted > self.waiting:
                raise Full
            self._admitted += 1
        try:
            yield
        finally:
            with self._lock:
                self._admitted -= 1
            self._jobs.put(None)

    def score(self, inputs: Inputs, abandoned: Callable[[], bool] = lambda: False) -> Scores:
        """Score samples, within `admit`, as soon as their turn has come.

        Raises:
            Abandoned: `abandoned` was true when it had.
            Stopping: the service ended otherwise than by `stop`.
            ValueError: the samples are not those that the reward takes.
            InvalidScores: the reward returned something that is not one number a sample.
            RuntimeError: the reward raised.
        """
        job = _Job(inputs, abandoned, Future())
        with self._lock:
            if self._ended:
                raise Stopping
            self._jobs.put(job)
        return job.result.result()

    def run(self) -> None:
        """Score what comes, until `stop` was called and all admitted requests are answered."""
        try:
            while not self._done():
                job = self._jobs.get()
                if job is not None:
                    self._do(job)
                # Its samples would stay in memory until the next one comes.
                del job
        finally:
            self._end()

    def stop(self) -> None:
        """Admit no more. May be called from a signal handler."""
        self._stopping = True
        self._jobs.put(None)

    def _done(self) -> bool:
        with self._lock:
            self._ended = self._stopping and self._admitted == 0
            return self._ended

    def _end(self) -> None:
        """Leave nobody waiting, however `run` ended."""
        with self._lock:
            self._ended = True
            while not self._jobs.empty():
                job = self._jobs.get()
                if job is not None:
                    job.result.set_exception(Stopping())

    def _do(self, job: _Job) -> None:
        if job.abandoned():
            job.result.set_exception(RequestAbandoned())
            return
        began = self._clock()
        try:
            scores = score_within(self.reward, job.inputs, "served reward")
        except BaseException as error:
            self.metrics.scored(len(job.inputs.prompts), self._clock() - began, failed=True)
            self._report(f"failed: {type(error).__name__}: {error}")
            job.result.set_exception(_portable(error))
            if not isinstance(error, Exception):
                raise
        else:
            self.metrics.scored(len(job.inputs.prompts), self._clock() - began, failed=False)
            job.result.set_result(scores)


def _portable(error: BaseException) -> Exception:
    """What an exception says, without the traceback that would keep the samples of the call in memory."""
    if isinstance(error, InvalidScores):
        return InvalidScores(str(error), error.index)
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(str(error) or type(error).__name__)
