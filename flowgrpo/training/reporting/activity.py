"""The last line of a terminal: it shows what a run is doing. A file or a pipe does not get this line."""

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
    """A line that shows the current activity, its time so far, and a bar of the time that it should take.

    Args:
        console: prints this line; other lines appear above it.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.shown = console.is_interactive and console.file.isatty() and not console.is_jupyter
        self._live: Live | None = None
        self._text, self._part = "", ""
        self._began, self._expected = 0.0, None  # type: float, float | None

    def begin(self, text: str, expected: float | None = None) -> None:
        """Show that an activity begins. It should take `expected` seconds, if that is known."""
        self._text, self._part, self._began, self._expected = text, "", time.perf_counter(), expected
        if self.shown and self._live is None:
            self._live = Live(self, console=self.console, transient=True, refresh_per_second=4)
            self._live.start()
            # Otherwise a killed process would leave the terminal without a cursor.
            self.console.show_cursor(True)

    def part(self, name: str) -> None:
        """Show which part of the activity runs now."""
        self._part = name

    def end(self) -> None:
        """Remove the line."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def line(self, width: int) -> RenderableType:
        """The line, in at most `width` columns (40 or more)."""
        elapsed, expected = time.perf_counter() - self._began, self._expected
        text = f"{self._text}: {self._part}" if self._part else self._text
        clock = duration(elapsed) if expected is None else f"{duration(elapsed)} of about {duration(expected)}"
        # If the activity takes longer than expected, nobody knows when it ends.
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
        """Draw the line; rich calls this a few times a second."""
        yield self.line(options.max_width)
