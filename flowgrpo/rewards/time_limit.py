"""Calls that are given up when they take too long.

Only the end of its process can end a call that hangs. So each call is made in a separate thread, and a call that hangs
is left there. The caller goes on at once: it reports the failure and ends the process. If a run has to continue after
such a call is killed, serve the reward from another process; see `serving`.
"""

from __future__ import annotations

import faulthandler
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ..parts.foreign import own_lines
from .given_up import flush, give_up
from .threads import Line

T = TypeVar("T")

SLICE_SECONDS = 1.0
GRACE_SECONDS = 60.0
LEAST_SECONDS = 1.0


class TimedOut(RuntimeError):
    """A call took too long, and still hangs in its thread; the message says at which line."""


def check_time_limit(name: str, seconds: Any) -> None:
    """Refuse a time limit that is not a positive, finite number of seconds.

    Raises:
        ValueError: the time limit is something else.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ValueError(
            f"reward {name!r}: time_limit is {seconds!r}; give seconds above 0, such as 60, or leave it out"
        )


class TimeLimit:
    """Makes calls one after another in a separate thread, and limits the time of each call.

    Time in which the process is suspended does not count, except for up to one second each time. A call may also keep
    every other thread from running, as a regular expression does. Then nothing in Python can report the call.
    `GRACE_SECONDS` after the limit, the process ends with status 1 and prints the stacks of its threads to standard
    error.

    Args:
        seconds: the limit of each call.
        name: the name of the reward, for messages.
    """

    def __init__(self, seconds: float, name: str) -> None:
        check_time_limit(name, seconds)
        self.seconds, self.name = float(seconds), name
        self._line: Line | None = None
        self._given_up = ""

    @property
    def given_up(self) -> bool:
        """Whether a call was given up. After that, no further call is made."""
        return bool(self._given_up)

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that makes the calls; None before the first call."""
        return None if self._line is None else self._line.thread

    def unlimited(self, call: Callable[[], T]) -> T:
        """Make a call in the same thread, without a time limit, and return its result."""
        return self._made().put(call).result()

    def __call__(self, call: Callable[[], T]) -> T:
        """Make a call that may take `seconds`, and return its result.

        Raises:
            TimedOut: this call or an earlier call took longer.
        """
        if self.given_up:
            raise TimedOut(f"an earlier call hangs: {self._given_up}")
        line = self._made()
        future, thread = line.put(call), line.thread
        try:
            with _watchdog.watching(self.seconds + GRACE_SECONDS):
                in_time = has_ended(future, self.seconds, thread)
            if not in_time:
                raise TimedOut(f"it took longer than its time_limit of {self.seconds:g} s{_place(thread)}")
        except BaseException as error:
            self._given_up = str(error) or type(error).__name__
            give_up(thread)
            line.end()
            raise
        return future.result()

    def close(self) -> None:
        """Let the thread end, unless a call hangs in it."""
        if self._line is not None:
            self._line.end()

    def _made(self) -> Line:
        self._line = self._line or Line(f"reward {self.name}")
        return self._line


def has_ended(future: Future[Any], seconds: float, thread: threading.Thread) -> bool:
    """Whether a call, which `thread` makes, ends within `seconds` during which this process is running."""
    left = seconds
    while not wait([future], timeout=min(left, SLICE_SECONDS)).done:
        # Each slice counts with its nominal length, because the process may have been suspended during it.
        left -= SLICE_SECONDS
        if left <= 0:
            return future.done()
    return True


def _place(thread: threading.Thread) -> str:
    """Return where a thread is, if that is known: its innermost line that is not in a library."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    last = (own_lines(stack) or stack)[-1]
    return f"; it is at {last.filename}:{last.lineno}, in {last.name}"


class _Watchdog:
    """Ends the process when a watched block takes too long and no Python thread can run to report it.

    A process has only one timer that works without the interpreter, so all blocks that are watched at the same time
    share it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[object, float] = {}

    @contextmanager
    def watching(self, seconds: float) -> Iterator[None]:
        """Watch a block, which may take `seconds`."""
        token = object()
        # The timer ends the process without flushing the output that was printed before.
        flush()
        self._set(token, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._set(token, None)

    def _set(self, token: object, end: float | None) -> None:
        with self._lock:
            if end is None:
                self._ends.pop(token)
            else:
                self._ends[token] = end
            # The timer needs a standard error to write to. Without one, no timer is set.
            with suppress(AttributeError, ValueError, OSError, RuntimeError):
                if not self._ends:
                    faulthandler.cancel_dump_traceback_later()
                    return
                left = max(min(self._ends.values()) - time.monotonic(), LEAST_SECONDS)
                faulthandler.dump_traceback_later(left, exit=True, file=sys.__stderr__ or sys.stderr)


_watchdog = _Watchdog()
