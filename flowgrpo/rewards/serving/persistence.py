"""How long a request is tried again: with patience if no server is there, and longer if a server says it is busy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from .http_client import Unavailable

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0

_log = logging.getLogger(__name__)
T = TypeVar("T")


def persist(
    attempt: Callable[[], T],
    patience: float,
    timeout: float,
    *,
    advice: str,
    sleep: Callable[[float], object],
    clock: Callable[[], float] = time.monotonic,
    spread: float = 1.0,
) -> T:
    """Return the result of `attempt`. While the server is unavailable, try again, with pauses that double.

    A server that says it is busy is there and makes progress, so the time until the next attempt is not counted as
    patience. A server that stays busy would otherwise be waited for without an end, so that time has a limit too.

    Args:
        attempt: function that makes one request.
        patience: seconds without a server after which no further attempt begins.
        timeout: seconds for one request. A server may be busy in a row for as long, or for the patience if it is more.
        advice: what to do if the server stays busy, for the message.
        sleep: function that waits; its argument is in seconds.
        clock: function that returns the time in seconds.
        spread: factor of the pauses; with different factors, many clients do not try again at the same time.

    Raises:
        Unavailable: one of the two limits has passed; the message says how often the request was tried.
    """
    began, pause = clock(), FIRST_PAUSE
    away, crowded = 0.0, 0.0
    number = 1
    while True:
        asked = clock()
        try:
            return attempt()
        except Unavailable as error:
            wait, now = max(pause * spread, error.pause), clock()
            took = now - asked + wait
            away, crowded = (away, crowded + took) if error.busy else (away + took, 0.0)
            spent, limit = (crowded, max(timeout, patience)) if error.busy else (away, patience)
            if spent > limit:
                tried = f"tried {number} times in {now - began:.0f} s" if number > 1 else "tried once"
                message = f"{error} ({tried})" + (f"; the server is busy: {advice}" if error.busy else "")
                raise Unavailable(message, error.status, error.body, error.pause, error.busy) from None
            if number == 1:
                _log.warning("%s; trying again for up to %g s", error, limit)
        sleep(wait)
        number += 1
        pause = min(2 * pause, LONGEST_PAUSE)
