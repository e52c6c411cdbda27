"""Ending a run on a signal where nothing is lost: preempted jobs, Ctrl-C, a terminal that is closed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
ONCE = 1.0
"""Seconds within which signals count as one: a terminal and a launcher may both pass on the same."""


class Stopped(KeyboardInterrupt):
    """A signal ends the process. Like Ctrl-C it is no Exception, for nobody is to take it for a failure.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Abandoned(BaseException):
    """An iteration is given up before it has moved any weights."""


class Stop:
    """Whether the run is to end, as signals say.

    The first signal ends the process at once by `Stopped`, but not within `deferred`: there `number` is set, and
    whoever works there ends where nothing is lost. The next signal ends the process without a word to anybody.

    Args:
        say: called with what happens now.
        leave: called with the exit status to end the process at once.
        clock: seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        leave: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = 0
        self.say, self._leave, self._clock = say or (lambda text: None), leave, clock
        self._deferred = self._open = False
        self._first = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals within the block, those that this process was not started to ignore."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # `nohup` and a shell's `&` let a process ignore some.
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
            Stopped: nothing is under way that must be brought to an end.
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
                f"{signal.Signals(number).name}: the run ends as soon as it can go on from there to the same numbers; "
                "a second signal ends it at once"
            )

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the block a signal is only noted."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def abandonable(self, modules: Iterable[nn.Module], possible: bool = True) -> Iterator[None]:
        """Within the block, until `settled`, a signal ends by `Abandoned` what these modules are evaluated for.

        Args:
            modules: whose evaluations are what takes the time.
            possible: off, the block runs to its end.

        Raises:
            Abandoned: before an evaluation, never within.
        """
        if not possible:
            yield
            return
        hooks = [module.register_forward_pre_hook(lambda *_: self.look()) for module in modules]
        self._open = True
        try:
            self.look()
            yield
        finally:
            self._open = False
            for hook in hooks:
                hook.remove()

    def look(self) -> None:
        """Raise Abandoned if a signal has come and that is possible."""
        if self._open and self.number:
            raise Abandoned

    def settled(self) -> None:
        """From now on the block is brought to its end: what was there before is gone."""
        self._open = False
