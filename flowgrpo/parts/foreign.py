"""Protection against code by other authors that would end the process, or move it to another folder."""

from __future__ import annotations

import os
import threading
import traceback
from types import TracebackType


class Quit(RuntimeError):
    """Foreign code raised something that would have ended the process, such as SystemExit; the message says where."""


class contained:
    """Context manager in which SystemExit and its kind become an Exception, so that they are reported as a failure.

    Otherwise `sys.exit` in a reward would end a run without results, and with the exit status that the reward gives,
    even 0. Ctrl-C still works: Python raises its KeyboardInterrupt only in the main thread, and there it is passed on.
    At the end the current folder is the one from before: a run folder may be a relative path.

    Args:
        what: beginning of the message, the subject of "raised SystemExit(0)".
        kind: type of the exception that is raised instead.
    """

    def __init__(self, what: str = "it", kind: type[Exception] = Quit) -> None:
        self.what, self.kind = what, kind

    def __enter__(self) -> contained:
        self.folder = _current_folder()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.folder is not None and _current_folder() != self.folder:
            os.chdir(self.folder)
        if error is None or isinstance(error, Exception):
            return
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            return
        last = traceback.extract_tb(trace)[-1]
        raise self.kind(
            f"{self.what} raised {error!r} at {last.filename}:{last.lineno}, which would have ended the process; "
            "return from there, or raise an Exception"
        ) from error


def _current_folder() -> str | None:
    """The current folder; None if somebody has removed it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
