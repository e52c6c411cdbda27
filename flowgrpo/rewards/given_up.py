"""Threads that hang and were given up, and the end of a process in which such threads remain."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_THREADS: list[threading.Thread] = []


def give_up(thread: threading.Thread) -> None:
    """Record that nobody waits for a thread any more."""
    _THREADS.append(thread)


def still_hanging() -> bool:
    """Whether a thread that was given up is still running."""
    _THREADS[:] = [thread for thread in _THREADS if thread.is_alive()]
    return bool(_THREADS)


def flush() -> None:
    """Flush standard output and standard error. A stream that is missing or broken is skipped."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


@contextmanager
def ended_for_sure() -> Iterator[None]:
    """Run a whole command in this context. When the command ends, the process ends, even if threads still hang.

    When Python exits by itself, it waits for every thread that a hanging reward has started, and it may crash if one of
    these threads still computes.
    """
    try:
        yield
    except SystemExit as ended:
        if still_hanging():
            flush()
            os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise
    except BaseException:
        if still_hanging():
            traceback.print_exc()
            flush()
            os._exit(1)
        raise
