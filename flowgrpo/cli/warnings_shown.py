"""Warnings of this package on the terminal, beside the lines of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def warnings_shown(note: Callable[[str], None] | None) -> Iterator[None]:
    """Show warnings of this package, such as of a reward server that does not answer, while the run waits for it."""
    if note is None:
        yield
        return
    logger, handler = logging.getLogger("flowgrpo"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: note(record.getMessage())  # type: ignore[method-assign]
    # The note is in run.log already, so the log's own handler needs no second line.
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
