"""Waits for servers that end as soon as nobody wants the answer any more.

A call of a reward may wait for minutes for a server that is away. It may do so in any thread. So each wait is cut into
slices, and before each slice the functions that `watched` has registered may raise `Unwanted`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..parts.foreign import Unwanted

__all__ = ["Unwanted", "look", "pause", "watched", "within"]

SLICE_SECONDS = 0.5

_looks: list[Callable[[], object]] = []


@contextmanager
def watched(check: Callable[[], object]) -> Iterator[None]:
    """Within the block, all waits for servers end with the exception that `check` raises, in whichever thread they are.

    Args:
        check: raises `Unwanted` if nobody wants an answer any more. It is called from several threads.
    """
    _looks.append(check)
    try:
        yield
    finally:
        _looks.remove(check)


def look() -> None:
    """Raise `Unwanted` if nobody wants an answer any more."""
    for check in tuple(_looks):
        check()


def pause(seconds: float, sleep: Callable[[float], object] = time.sleep) -> None:
    """Wait for some seconds.

    Raises:
        Unwanted: nobody wants an answer any more.
    """
    look()
    left = seconds
    while left > 0:
        sleep(min(left, SLICE_SECONDS))
        left -= SLICE_SECONDS
        look()


def within(event: threading.Event, seconds: float, clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether an event is set within some seconds.

    Raises:
        Unwanted: nobody wants an answer any more.
    """
    end = clock() + seconds
    while True:
        look()
        left = end - clock()
        if event.wait(max(0.0, min(left, SLICE_SECONDS))):
            return True
        if left <= SLICE_SECONDS:
            return False
