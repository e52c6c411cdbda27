"""What a run is doing at the moment, on the last line of a terminal; a file or a pipe gets nothing of it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .progress_table import duration, shortened

_BAR, _NAME = 24, 12


class Activity:
    """A line that says what is done, for how long by now, and with a bar of how long it should take.

    Args:
        console: where lines are printed; others appear above this one.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.shown = console.is_interactive and console.file.isatty() and not console.is_jupyter
        self._live: Live | None = None
        self._text, self._part = "", ""
        self._began, self._expected = 0.0, None  # type: float, float | None

    def begin(self, text: str, expected: float | None = None) -> None:
        """Say that something begins, which should take `expected` seconds, where that is known."""
        self._text, self._part, self._began, self._expected = text, "", time.perf_counter(), expected
        if self.shown and self._live is None:
            self._live = Live(self, console=self.console, transient=True, refresh_per_second=4)
            self._live.start()
            # A process that is killed would leave the terminal without its cursor.
            self.console.show_cursor(True)

    def part(self, name: str) -> None:
        """Say which part of it is done now."""
        self._part = name

    def end(self) -> None:
        """Take the line away."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def line(self, width: int) -> RenderableType:
        """What is shown, in at most `width` columns (40 or more)."""
        elapsed, expected = time.perf_counter() - self._began, self._expected
        text = f"{self._text}: {self._part}" if self._part else self._text
        clock = duration(elapsed) if expected is None else f"{duration(elapsed)} of about {duration(expected)}"
        # The end of a long one is not known by its length so far.
        known = expected is not None and elapsed < expected
        room = width - len(clock) - 2
        bar = max(min(_BAR, room - _NAME), 1)
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            Text(shortened(text, room - bar), "dim"),
            ProgressBar(total=expected or 1.0, completed=elapsed, width=bar, pulse=not known),
            Text(clock, "dim"),
        )
        return grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Drawn anew a few times a second."""
        yield self.line(options.max_width)
