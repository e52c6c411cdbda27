"""Threads that hang and were given up, and how a process ends that still has some."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_THREADS: list[threading.Thread] = []


def give_up(thread: threading.Thread) -> None:
    """Note that nobody waits for a thread any more."""
    _THREADS.append(thread)


def still_hanging() -> bool:
    """Whether a thread that was given up has not ended since."""
    _THREADS[:] = [thread for thread in _THREADS if thread.is_alive()]
    return bool(_THREADS)


def flush() -> None:
    """Write out what was printed, as far as there is anything to write to."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


@contextmanager
def ended_for_sure() -> Iterator[None]:
    """The whole of a command: at its end the process ends, whatever still hangs in it.

    Python's own end waits for every thread that a hanging reward has started, and may crash on one that computes.
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
