"""`run.log` of a run folder: the lines that the run printed, with their times, and warnings."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

NAME = "run.log"
# The root logger, and the loggers that do not pass their messages on to it.
_LOGGERS = ("", "diffusers", "torch", "transformers")


class RunLog:
    """Appends to `run.log`; each line begins with the local time and its offset from UTC.

    Within its context, the log also gets the warnings of Python and of libraries, and the error that ended the run.
    Lines that are written before `open` are kept until then. If the log cannot be written, the standard error says so
    once, and the run goes on.

    Args:
        active: whether this process writes; only the main process should.
    """

    def __init__(self, active: bool = True) -> None:
        self.active = active
        self.path: Path | None = None
        self._waiting = ""
        self._lock = threading.RLock()
        self._handler = _Handler(self)
        self._showwarning: Any = None

    def open(self, folder: Path) -> None:
        """From now on, append to the log of this run folder."""
        with self._lock:
            self.path = folder / NAME
            waiting, self._waiting = self._waiting, ""
            self._append(("\n" if _is_cut(self.path) else "") + waiting)

    def write(self, text: str) -> None:
        """Append a text, line by line."""
        now = time.strftime("%Y-%m-%d %H:%M:%S%z")
        with self._lock:
            self._append("".join(f"{now} {line}".rstrip() + "\n" for line in text.splitlines()))

    def _append(self, lines: str) -> None:
        if not self.active:
            return
        if self.path is None:
            self._waiting += lines
            return
        try:
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(lines)
        except OSError as error:
            self.active = False
            if not self.path.parent.is_dir():
                return  # the run could not begin, and its folder was removed
            print(f"{self.path} is no longer written, and the run goes on: {error}", file=sys.stderr)

    def __enter__(self) -> RunLog:
        """Listen to warnings."""
        self._showwarning = warnings.showwarning
        warnings.showwarning = self._warned
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self._handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening. If an error ended the run, write the error."""
        warnings.showwarning = self._showwarning
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self._handler)
        if isinstance(error, Exception):
            self.write("".join(traceback.format_exception(error)))
        elif isinstance(error, KeyboardInterrupt):
            self.write(str(error) or "interrupted")

    def _warned(
        self, message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        self.write(f"{category.__name__}: {message} ({filename}:{lineno})")
        self._showwarning(message, category, filename, lineno, file, line)


def _is_cut(file: Path) -> bool:
    """Whether a kill has cut the last line of a file short."""
    if not file.is_file() or not file.stat().st_size:
        return False
    with file.open("rb") as handle:
        handle.seek(-1, os.SEEK_END)
        return handle.read() != b"\n"


class _Handler(logging.Handler):
    """Writes the warnings and errors of libraries to a log."""

    def __init__(self, log: RunLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write(f"{record.levelname.lower()}: {record.name}: {record.getMessage()}")
