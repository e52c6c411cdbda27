"""A service that scores one request at a time, with a bounded queue of waiting requests."""

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

AWAKE = 0.5
"""Seconds after which the waiting service looks around. A signal that comes just before the service waits, or in
another thread, does not wake it, and Python calls a signal's handler in this thread only."""


class Full(Exception):
    """The queue is full: the largest allowed number of requests is being scored or waiting."""


class Stopping(Exception):
    """The service is ending. It takes no new requests, and finishes the earlier ones."""


class RequestAbandoned(Exception):
    """The client that sent the request has gone."""


@dataclass(frozen=True)
class _Job:
    inputs: Inputs
    abandoned: Callable[[], bool]
    result: Future[Scores]


class Service:
    """Calls a reward in the thread that calls `run`, for requests from other threads.

    Rewards are made for one thread: their models, databases and processes must be used in the thread in which they were
    made. Requests are scored in the order in which they were completely received.

    Args:
        reward: the reward that is called.
        waiting: how many requests may wait at most while one is scored.
        report: function that is called with one line of text for each failure.
        clock: function that returns the time in seconds, for the metrics.
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
        # Unlike `queue.Queue`, this queue may be written to in a signal handler.
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
        """Number of requests that are being read, are waiting, or are being scored or answered."""
        return self._admitted

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Reserve a place for one request, from before the request is read until it is answered.

        Raises:
            Full: there is no free place.
            Stopping: the service is ending.
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
        """Score samples when their turn comes. Call this within `admit`.

        Raises:
            RequestAbandoned: `abandoned` was true when the turn came.
            Stopping: the service ended, but not because of `stop`.
            ValueError: the reward does not take such samples.
            InvalidScores: the reward did not return one number for each sample.
            RuntimeError: the reward raised.
        """
        job = _Job(inputs, abandoned, Future())
        with self._lock:
            if self._ended:
                raise Stopping
            self._jobs.put(job)
        return job.result.result()

    def run(self) -> None:
        """Score requests until `stop` has been called and all admitted requests are answered."""
        try:
            while not self._done():
                try:
                    job = self._jobs.get(timeout=AWAKE)
                except queue.Empty:
                    continue
                if job is not None:
                    self._do(job)
                # Without this, the samples of the request would stay in memory until the next request.
                del job
        finally:
            self._end()

    def stop(self) -> None:
        """Admit no more requests. This method may be called from a signal handler."""
        self._stopping = True
        self._jobs.put(None)

    def _done(self) -> bool:
        with self._lock:
            self._ended = self._stopping and self._admitted == 0
            return self._ended

    def _end(self) -> None:
        """Answer all requests that still wait, in whatever way `run` ended."""
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
    """Return a copy of an exception without its traceback, which would keep the samples of the call in memory."""
    if isinstance(error, InvalidScores):
        return InvalidScores(str(error), error.index)
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(str(error) or type(error).__name__)
