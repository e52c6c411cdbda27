"""Calls that are given up when they take too long.

Nothing can end a call that hangs but the end of its process. So the call is made in a thread of its own, and is left
there: whoever asked goes on at once, to report it and to end the process. What needs more than that, a call that is
killed while the run goes on, is served by another process, see `serving`.
"""

from __future__ import annotations

import faulthandler
import math
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from .given_up import flush, give_up
from .threads import Line

T = TypeVar("T")

SLICE_SECONDS = 1.0
GRACE_SECONDS = 60.0
LEAST_SECONDS = 1.0


class TimedOut(RuntimeError):
    """A call took too long, and goes on hanging in its thread; the message says where."""


def check_time_limit(name: str, seconds: Any) -> None:
    """Refuse a time limit that is no positive, finite number of seconds.

    Raises:
        ValueError: as said.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise ValueError(
            f"reward {name!r}: time_limit is {seconds!r}; give seconds above 0, such as 60, or leave it out"
        )


class TimeLimit:
    """Makes calls one after another in a thread of its own, and gives each of them so many seconds.

    While the process is suspended the time stands still, give or take a second a time. Where a call also keeps every
    other thread from running, as a regular expression does, nothing in Python can report it: `GRACE_SECONDS` later the
    process ends with status 1, and with the stacks of its threads on standard error.

    Args:
        seconds: for each call.
        name: of what is called, for messages.
    """

    def __init__(self, seconds: float, name: str) -> None:
        check_time_limit(name, seconds)
        self.seconds, self.name = float(seconds), name
        self._line: Line | None = None
        self._given_up = ""

    @property
    def given_up(self) -> bool:
        """Whether a call was given up; none is made after it."""
        return bool(self._given_up)

    @property
    def thread(self) -> threading.Thread | None:
        """The thread of the calls, once there was one."""
        return None if self._line is None else self._line.thread

    def unlimited(self, call: Callable[[], T]) -> T:
        """The result of a call in the same thread that may take as long as it likes."""
        return self._made().put(call).result()

    def __call__(self, call: Callable[[], T]) -> T:
        """The result of a call, which may take `seconds`.

        Raises:
            TimedOut: it took longer, or one before it did.
        """
        if self.given_up:
            raise TimedOut(f"a call before this one hangs: {self._given_up}")
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
        """Let the thread end, if it does not hang."""
        if self._line is not None:
            self._line.end()

    def _made(self) -> Line:
        self._line = self._line or Line(f"reward {self.name}")
        return self._line


def has_ended(future: Future[Any], seconds: float, thread: threading.Thread) -> bool:
    """Whether a call ends within so many seconds in which this process runs; `thread` makes it."""
    left = seconds
    while not wait([future], timeout=min(left, SLICE_SECONDS)).done:
        # A slice counts as what it should have taken, although the process may have been suspended meanwhile.
        left -= SLICE_SECONDS
        if left <= 0:
            return future.done()
    return True


def _place(thread: threading.Thread) -> str:
    """Where a thread is, if that can be seen: its innermost line that is not of a library."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    own = [entry for entry in stack if not entry.filename.startswith((*libraries, "<"))]
    last = (own or stack)[-1]
    return f"; it is at {last.filename}:{last.lineno}, in {last.name}"


class _Watchdog:
    """Ends the process when what is watched takes too long and no thread of Python can say so.

    There is one timer a process that needs no interpreter, so those who wait at the same time share it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[object, float] = {}

    @contextmanager
    def watching(self, seconds: float) -> Iterator[None]:
        """A block that has so many seconds."""
        token = object()
        # The timer ends the process without writing out what was printed before.
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
            # Without a standard error there is nothing to write to, and no timer.
            with suppress(AttributeError, ValueError, OSError, RuntimeError):
                if not self._ends:
                    faulthandler.cancel_dump_traceback_later()
                    return
                left = max(min(self._ends.values()) - time.monotonic(), LEAST_SECONDS)
                faulthandler.dump_traceback_later(left, exit=True, file=sys.__stderr__ or sys.stderr)


_watchdog = _Watchdog()
