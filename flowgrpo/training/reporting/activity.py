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

_BAR = 12
_WIDE, _NARROW = 72, 64
"""From `_WIDE` columns on, the line has a bar and says how long it should take. Below `_NARROW` it has no bar."""
_WORDS = {"denoiser": "sampling", "decode": "decoding", "reward": "scoring", "optimizer": "optimizer step", "rest": ""}
"""What the line calls the parts of the clock."""


class Activity:
    """A line with a bar, the time so far, and the current activity with its part and what is done of this part.

    Args:
        console: prints this line; other lines appear above it.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.shown = console.is_interactive and console.file.isatty() and not console.is_jupyter
        self.text = ""
        self._live: Live | None = None
        self._part, self._counted = "", ""
        self._done, self._total = 0, 0
        self._began, self._expected = 0.0, None  # type: float, float | None

    def begin(self, text: str, expected: float | None = None) -> None:
        """Show that an activity begins. It should take `expected` seconds, if that is known."""
        self.text, self._began, self._expected = text, time.perf_counter(), expected
        self._part, self._counted, self._total = "", "", 0
        if self.shown and self._live is None:
            self._live = Live(self, console=self.console, transient=True, refresh_per_second=4)
            self._live.start()
            # Otherwise a killed process would leave the terminal without a cursor.
            self.console.show_cursor(True)

    def part(self, name: str) -> None:
        """Show which part of the activity runs now."""
        self._part = _WORDS.get(name, name)

    def count(self, done: int, total: int) -> None:
        """Show how much of the part that runs now is done, as long as this part runs."""
        self._counted, self._done, self._total = self._part, done, total

    def end(self) -> None:
        """Remove the line."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def line(self, width: int) -> RenderableType:
        """The line, in at most `width` columns (20 or more)."""
        elapsed, expected = time.perf_counter() - self._began, self._expected
        known = self._total > 0 and self._counted == self._part
        text = f"{self.text}: {self._part}" if self._part else self.text
        text += f" {self._done:,}/{self._total:,}" if known else ""
        clock = duration(elapsed)
        if expected is not None and width >= _WIDE:
            clock += f" of about {duration(expected)}"
        room = width - len(clock) - 1
        cells: list[RenderableType] = [Text(clock, "dim")]
        if width >= _NARROW:
            # The bar has a fixed place and width, so that it does not jump when the words beside it change.
            cells.insert(0, self._bar(elapsed, known))
            room -= _BAR + 1
        grid = Table.grid(padding=(0, 1))
        grid.add_row(*cells, Text(shortened(text, room), "dim"))
        return grid

    def _bar(self, elapsed: float, known: bool) -> ProgressBar:
        """The bar of the time, if the time is known; else of what is counted; else a bar that only moves.

        If an activity takes longer than expected, nobody knows when it ends.
        """
        if self._expected is not None and elapsed < self._expected:
            return ProgressBar(total=self._expected, completed=elapsed, width=_BAR)
        if self._expected is None and known:
            return ProgressBar(total=self._total, completed=self._done, width=_BAR)
        return ProgressBar(width=_BAR, pulse=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Draw the line; rich calls this a few times a second."""
        yield self.line(options.max_width)
