"""How commands end after a signal, and `train` and `resume` on a full disk: these two say how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from .output import is_first, say

if TYPE_CHECKING:
    from ..training.stopping import Stop, Stopped


@contextmanager
def stoppable(run: Path) -> Iterator[Stop]:
    """End the run of the block after a signal, at a point where nothing is lost; without a run, end at once.

    The exit status is then 128 plus the number of the signal.

    Raises:
        ValueError: the disk is full; the message says how to go on later.
    """
    from ..training.folder.files import FULL, explained
    from ..training.stopping import Stop, Stopped

    stop = Stop(say if is_first() else None)
    try:
        with stop.listening():
            yield stop
    except Stopped as stopped:
        raise _exit_of(stopped, f"; {_onward(run)}{_look_at(run)}") from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ValueError(f"{explained(error)}; then: {_onward(run)}") from error


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the command of the block after a signal as after an error, so that it ends what it started.

    The exit status is then 128 plus the number of the signal.
    """
    from ..training.stopping import Stop, Stopped

    try:
        with Stop().listening():
            yield
    except Stopped as stopped:
        raise _exit_of(stopped) from None


def _exit_of(stopped: Stopped, onward: str = "") -> typer.Exit:
    """Say which signal ended a command; returns the exit to raise."""
    # The terminal may be gone.
    with suppress(OSError):
        Console(stderr=True).print(f"{stopped}{onward}", highlight=False, markup=False, soft_wrap=True)
    # typer's own exit: `sys.exit` within a command counts as a failure.
    return typer.Exit(128 + stopped.number)


def _look_at(run: Path) -> str:
    """How to see the samples that the run has made; empty if it has made none."""
    made = (run / "samples" / "index.jsonl").is_file()
    return f", or look at its samples with `flowgrpo gallery {run}`" if made else ""


def _onward(run: Path) -> str:
    if (run / "config.yaml").is_file():
        return f"go on with `flowgrpo resume {run}`"
    return "there is no run yet; start it again"
