"""Where the time of an iteration goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


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
        """Called with the name of the part that begins or goes on."""
        self._open = ["rest"]
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
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside for `name`."""
        self._switch()
        self._open.append(name)
        self._tell()
        try:
            yield
        finally:
            self._switch()
            self._open.pop()
            self._tell()

    def _tell(self) -> None:
        if self.watcher is not None:
            self.watcher(self._open[-1])

    def lap(self) -> dict[str, float]:
        """Seconds by part since the last lap."""
        self._switch()
        taken, self.seconds = self.seconds, dict.fromkeys(self.parts, 0.0)
        return taken
