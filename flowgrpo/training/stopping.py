"""Ending a run on a signal without losing work: a preempted job, Ctrl-C, a closed terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from ..rewards.waiting import Unwanted, watched

if TYPE_CHECKING:
    from torch import nn

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
ONCE = 1.0
"""Seconds within which two signals count as one. A terminal and a launcher may both deliver the same signal."""


class Stopped(KeyboardInterrupt):
    """A signal ends the process. `Stopped` is no Exception, as KeyboardInterrupt is none: a signal is not a failure.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Abandoned(Unwanted):
    """An iteration is given up before it has changed any weights."""


class Stop:
    """Whether a signal has asked the run to end.

    The first signal raises `Stopped`. Within `deferred` it only sets `number`, and the code of the block ends the run
    at a place where nothing is lost. The second signal ends the process at once.

    Args:
        say: called with a sentence about what happens next.
        leave: called with the exit status, to end the process at once.
        clock: returns seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        leave: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = 0
        self.say, self._leave, self._clock = say or (lambda text: None), leave, clock
        self.moved = False
        """Whether the weights have moved since the last `abandonable` block began, or are about to."""
        self._deferred = self._open = False
        self._first = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals within the block, except the signals that this process was started to ignore."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # `nohup` and a shell's `&` start a process that ignores some signals.
        taken = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
        try:
            for number in taken:
                signal.signal(number, self.heard)
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def heard(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal.

        Raises:
            Stopped: the first signal has come, outside `deferred`.
        """
        if self.number:
            if self._clock() - self._first >= ONCE:
                with suppress(OSError, ValueError):
                    sys.stdout.flush()
                self._leave(128 + number)
            return
        self.number, self._first = number, self._clock()
        if not self._deferred:
            raise Stopped(number)
        # The terminal may be gone, or the signal may have come in the middle of a line.
        with suppress(OSError, ValueError, RuntimeError):
            self.say(
                f"{signal.Signals(number).name}: the run ends at the next place from which `resume` gives the same "
                "numbers; a second signal ends it at once"
            )

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the block, a signal only sets `number`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def abandonable(self, modules: Iterable[nn.Module], possible: bool = True) -> Iterator[None]:
        """Within the block, a signal raises `Abandoned`, until `settled`: before the next evaluation of a module, and
        in a wait for the server of a reward.

        Args:
            modules: the modules whose evaluations take most of the time.
            possible: if False, the block runs to its end.

        Raises:
            Abandoned: before an evaluation, never within one, or in place of scores.
        """
        self.moved = False
        if not possible:
            yield
            return
        hooks = [module.register_forward_pre_hook(lambda *_: self.look()) for module in modules]
        self._open = True
        try:
            self.look()
            with watched(self.look):
                yield
        finally:
            self._open = False
            for hook in hooks:
                hook.remove()

    def look(self) -> None:
        """Raise `Abandoned` if a signal has come and the block may be given up."""
        if self._open and self.number:
            raise Abandoned

    def settled(self) -> None:
        """From now on the block runs to its end, because the weights before it are no longer there."""
        self._open, self.moved = False, True
