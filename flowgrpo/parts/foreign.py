"""Code that somebody else wrote, and that must not end the process in which it is called."""

from __future__ import annotations

import threading
import traceback
from types import TracebackType


class Quit(RuntimeError):
    """Foreign code raised what would have ended the process, such as SystemExit; the message says where."""


class contained:
    """Context manager: what is raised within it and is no Exception becomes one, so that it is reported as a failure.

    `sys.exit` in a reward would otherwise end a run with whatever status the reward wrote there, 0 included, and with
    no results. Ctrl-C goes on: Python raises its KeyboardInterrupt in the main thread, and nowhere else.

    Args:
        what: beginning of the message, the subject of "raised SystemExit(0)".
        kind: of the exception that it becomes.
    """

    def __init__(self, what: str = "it", kind: type[Exception] = Quit) -> None:
        self.what, self.kind = what, kind

    def __enter__(self) -> contained:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Exception):
            return
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            return
        last = traceback.extract_tb(trace)[-1]
        raise self.kind(
            f"{self.what} raised {error!r} at {last.filename}:{last.lineno}, which would have ended the process; "
            "return from there, or raise an Exception"
        ) from error
