"""Protection against code by other authors that would end the process, or change what all code of it shares."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

_PACKAGE = str(Path(__file__).resolve().parents[1])


def of_package(file: str) -> bool:
    """Whether a file of code belongs to this package."""
    return file.startswith(_PACKAGE + os.sep)


def is_own(file: str) -> bool:
    """Whether a file of code is a user's own: in no library, and not in this package."""
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return not ("site-packages" in file or of_package(file) or file.startswith((*libraries, "<")))


def own_lines(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The calls that are in a user's own files."""
    return [frame for frame in frames if is_own(frame.filename)]


def own_line(error: BaseException, also: str | None = None) -> traceback.FrameSummary | None:
    """The innermost call of a user's own code from which an exception came; None if no such code was called.

    Args:
        error: the exception.
        also: a file whose calls count too, such as the file of an installed plug-in.
    """
    found = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)
             or frame.filename == also]  # fmt: skip
    return found[-1] if found else None


class Quit(RuntimeError):
    """Foreign code raised something that would have ended the process, such as SystemExit; the message says where."""


class Unwanted(BaseException):
    """Raised by this package within foreign code, because nobody wants the result any more; it is no failure."""


class contained:
    """Context manager in which SystemExit and its kind become an Exception, so that they are reported as a failure.

    Otherwise `sys.exit` in a reward would end a run without results, and with the exit status that the reward gives,
    even 0. Ctrl-C still works: Python raises its KeyboardInterrupt only in the main thread, and there it is passed on.
    `Unwanted` is passed on in every thread.
    At the end the current folder is the one from before, because a run folder may be a relative path. Torch's default
    dtype is the one from before as well, because the tensors of a run would get another precision.

    Args:
        what: beginning of the message, the subject of "raised SystemExit(0)".
        kind: type of the exception that is raised instead.
    """

    def __init__(self, what: str = "it", kind: type[Exception] = Quit) -> None:
        self.what, self.kind = what, kind

    def __enter__(self) -> contained:
        _shared.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _shared.leave()
        if error is None or isinstance(error, Exception | Unwanted):
            return
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            return
        last = traceback.extract_tb(trace)[-1]
        raise self.kind(
            f"{self.what} raised {error!r} at {last.filename}:{last.lineno}, which would have ended the process; "
            "return from there, or raise an Exception"
        ) from error


class _Shared:
    """What all threads share, as it was when the first of them entered; it is given back when the last one leaves.

    Two rewards may score at once. So what one thread finds at its beginning may be a change that another thread has
    made for a moment, and must not be given back.
    """

    def __init__(self) -> None:
        self.lock, self.inside = threading.Lock(), 0

    def enter(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.folder, self.dtype = _current_folder(), _default_dtype()
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside:
                return
            if self.folder is not None and _current_folder() != self.folder:
                os.chdir(self.folder)
            if self.dtype is not None and _default_dtype() != self.dtype:
                sys.modules["torch"].set_default_dtype(self.dtype)


def _current_folder() -> str | None:
    """The current folder; None if somebody has removed it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _default_dtype() -> Any:
    """Torch's default dtype; None if nobody has imported torch, because this package does not need it."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_default_dtype()


_shared = _Shared()
