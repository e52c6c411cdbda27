"""What `train` and `resume` do with signals and full disks: they say how the run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from .output import is_first, say

if TYPE_CHECKING:
    from ..training.stopping import Stop


@contextmanager
def stoppable(run: Path) -> Iterator[Stop]:
    """Within the block a signal ends the run where nothing is lost, or the command at once where nothing is under way.

    The exit status is then 128 and the number of the signal.

    Raises:
        ValueError: the disk is full; says how the run goes on once it is not.
    """
    from ..training.folder.files import FULL, explained
    from ..training.stopping import Stop, Stopped

    stop = Stop(say if is_first() else None)
    try:
        with stop.listening():
            yield stop
    except Stopped as stopped:
        # The terminal may be gone.
        with suppress(OSError):
            Console(stderr=True).print(f"{stopped}; {_onward(run)}", highlight=False, markup=False, soft_wrap=True)
        # typer's own exit: `sys.exit` within a command counts as a failure.
        raise typer.Exit(128 + stopped.number) from None
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise ValueError(f"{explained(error)}; then: {_onward(run)}") from error


def _onward(run: Path) -> str:
    if (run / "config.yaml").is_file():
        return f"go on with `flowgrpo resume {run}`"
    return "there is no run yet; start it again"
