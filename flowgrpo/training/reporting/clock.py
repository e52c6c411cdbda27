"""Where the time of an iteration goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..device_memory import met_in


class Clock:
    """Seconds by part of an iteration. Time in a nested part counts for the inner part alone; all other time is `rest`.

    Args:
        device: the clock waits for its work before each reading.
        parts: names of the parts, with `rest`.
    """

    def __init__(self, device: torch.device, parts: Sequence[str]) -> None:
        self.device, self.parts = device, tuple(parts)
        self.seconds = dict.fromkeys(self.parts, 0.0)
        self.watcher: Callable[[str], None] | None = None
        """Called with the name of the part that begins or goes on, or with what is shown in its place."""
        self.counter: Callable[[int, int], None] | None = None
        """Called with how much of the running part is done, and with the whole."""
        self._open = ["rest"]
        self._shown = ["rest"]
        self._since = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _switch(self) -> None:
        now = self._now()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str, shown: str | None = None) -> Iterator[None]:
        """Count what happens inside for `name`; the watcher is told `shown`, if it is given."""
        self._switch()
        self._open.append(name)
        self._shown.append(shown or name)
        self.doing(self._shown[-1])
        try:
            yield
        except RuntimeError as error:
            met_in(error, self._shown[-1])
            raise
        finally:
            self._switch()
            self._open.pop()
            self._shown.pop()
            self.doing(self._shown[-1])

    def doing(self, what: str) -> None:
        """Tell the watcher what happens now. No time is measured."""
        if self.watcher is not None:
            self.watcher(what)

    def count(self, done: int, total: int) -> None:
        """Tell the counter how much of the running part is done. No time is measured."""
        if self.counter is not None:
            self.counter(done, total)

    def lap(self) -> dict[str, float]:
        """Seconds by part since the last lap."""
        self._switch()
        taken, self.seconds = self.seconds, dict.fromkeys(self.parts, 0.0)
        return taken
