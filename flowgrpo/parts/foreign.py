"""Protection against code by other authors that would end the process in which it is called."""

from __future__ import annotations

import threading
import traceback
from types import TracebackType


class Quit(RuntimeError):
    """Foreign code raised something that would have ended the process, such as SystemExit; the message says where."""


class contained:
    """Context manager in which SystemExit and its kind become an Exception, so that they are reported as a failure.

    Otherwise `sys.exit` in a reward would end a run without results, and with the exit status that the reward gives,
    even 0. Ctrl-C still works: Python raises its KeyboardInterrupt only in the main thread, and there it is passed on.

    Args:
        what: beginning of the message, the subject of "raised SystemExit(0)".
        kind: type of the exception that is raised instead.
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
