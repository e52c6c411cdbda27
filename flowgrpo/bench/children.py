"""Commands that a measurement starts as processes of their own: they end with it, and their failures are explained."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LINES = 8
"""Lines of what a failed process printed that a message has, if none of them is an error of a command."""
GRACE = 10.0
"""Seconds that a process has to end after SIGTERM."""


class ChildFailed(ValueError):
    """A command that a measurement started has failed."""


@contextmanager
def workplace(name: str) -> Iterator[Path]:
    """A new temporary folder; it stays if a command failed in it, because the error of the command names files in it.

    Args:
        name: of the measurement.

    Raises:
        ChildFailed: a command failed in the block; the message then names the folder too.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"flowgrpo-bench-{name}-"))
    kept = False
    try:
        yield folder
    except ChildFailed as error:
        kept = True
        raise ChildFailed(f"{error}\nthe files of what failed are kept in {folder}") from None
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def of_package(words: Sequence[str]) -> list[str]:
    """The command line of `flowgrpo WORDS` with this interpreter."""
    return [sys.executable, "-m", __name__.partition(".")[0], *words]


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command. When the block is left, for whatever reason, the process has ended.

    Args:
        command: the command line.
        log: a new file for its errors and warnings.
    """
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    # A run that hears SIGTERM also ends the processes that it has started.
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def refuse_failure(command: Sequence[str], status: int, log: Path) -> None:
    """Explain the end of a process that failed.

    Args:
        command: its command line.
        status: its exit status; if a signal ended the process, the negative number of the signal.
        log: what it printed.

    Raises:
        ChildFailed: the status is not 0.
    """
    if status:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        cause = _cause(log.read_text(encoding="utf-8", errors="replace")) or "it printed no error"
        raise ChildFailed(f"`{shlex.join(command)}` {how}:\n{cause}")


def _cause(printed: str) -> str:
    """The last lines of what a process printed, from its last error on if there is one."""
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    places = [k for k, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(lines[places[-1] :] if places else lines[-LINES:])
