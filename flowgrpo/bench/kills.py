"""Tests that a run can end at any of its file operations, and then resumes to the same result, bit for bit."""

from __future__ import annotations

import errno
import os
import runpy
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from diffusers import StableDiffusion3Pipeline  # noqa: F401  (imported once, before processes are forked)

from ..configs.load import dump_recipe
from ..configs.schema import AnyRecipe
from ..training.folder.run_folder import write_text
from ..training.session import Session  # noqa: F401  (as above)
from ..training.stopping import SIGNALS
from .children import of_package, refuse_failure
from .interruption import contents

HOW = ("kill", "torn", "signal", "full")
"""SIGKILL before the operation; SIGKILL with the file half on disk; SIGTERM; no room for the operation."""

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}
_WRITES = {"open", "os.mkdir", "os.rename", "fsync"}
_KEPT = {".flowgrpo-lock", ".flowgrpo-gallery.json", ".flowgrpo-thumbnails.json"}


@dataclass(frozen=True)
class Operation:
    """An operation that changes a file: its number in the run, its kind, and its path within the run folder."""

    number: int
    kind: str
    path: str

    def ways(self) -> list[str]:
        """The ways in which a run can end at this operation."""
        return [
            "kill", *(["torn"] if self.kind == "fsync" else []), "signal", *(["full"] if self.kind in _WRITES else [])
        ]  # fmt: skip


class KillWatch:
    """Numbers the operations of this process on the files of a folder, beginning with the call of `begin`.

    Args:
        folder: the folder whose files count.
        act: called with each operation before it is done; may raise OSError to make the operation fail.
    """

    def __init__(self, folder: Path, act: Callable[[Operation, int | None], None]) -> None:
        self.folder, self._act, self._count, self._inside = str(folder.resolve()), act, 0, False

    def begin(self) -> None:
        """Watch until the process ends."""
        sys.addaudithook(self._heard)
        flush = os.fsync

        def fsync(fd: Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            self._met("fsync", os.readlink(f"/proc/self/fd/{number}"), number)
            flush(fd)

        os.fsync = fsync  # type: ignore[assignment]

    def _heard(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = given
            changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            if set(mode) & set("wax+") if isinstance(mode, str) else flags & changing:
                self._met(event, path)
        elif event in _CHANGES:
            # While a tree is removed, names are relative to an open folder.
            relative = len(given) > 1 and isinstance(given[-1], int) and given[-1] >= 0
            self._met(event, f"{self.folder}/…/{given[0]}" if relative else given[0])

    def _met(self, kind: str, path: Any, handle: int | None = None) -> None:
        if self._inside or not isinstance(path, str | bytes | os.PathLike):
            return
        place = os.path.abspath(os.fsdecode(path))
        if place != self.folder and not place.startswith(self.folder + os.sep):
            return
        self._inside = True
        try:
            self._act(Operation(self._count, kind, os.path.relpath(place, self.folder)), handle)
        finally:
            self._inside = False
            self._count += 1


def kills(
    recipe: AnyRecipe, folder: Path, report: Callable[[str], None], every: int = 1, how: Sequence[str] = HOW
) -> dict[str, Any]:
    """Run a recipe once. Then, for each file operation and each way to end, end a new run, resume it, and compare.

    Processes are forked from this process, which must not have used torch before.

    Args:
        recipe: give it few iterations, prompts and tokens, because every case makes a run and resumes it.
        folder: a new folder for the runs.
        report: called with lines of progress.
        every: 1 for all cases, n for every n-th case of each way.
        how: the ways to end, from `HOW`.

    Returns:
        The number of operations by kind, the number of cases by way, and the failed cases with their reasons.

    Raises:
        ChildFailed: the unbroken run failed.
    """
    folder.mkdir(parents=True)
    source, listing = folder / "recipe.yaml", folder / "operations.txt"
    write_text(source, dump_recipe(recipe))
    whole = folder / "whole"
    with listing.open("w", encoding="utf-8") as lines:
        status = _forked(
            _train(source, whole), folder / "whole.log",
            KillWatch(whole, lambda op, _: print(op.number, op.kind, op.path, sep="\t", file=lines, flush=True)),
        )  # fmt: skip
    refuse_failure(of_package(_train(source, whole)), status, folder / "whole.log")
    operations = [_read(line) for line in listing.read_text(encoding="utf-8").splitlines()]
    cases = [(op, way) for way in how for op in [op for op in operations if way in op.ways()][::every]]
    report(f"unbroken run: {len(operations)} file operations, {len(cases)} cases")
    reference, failed, ended = contents(whole), [], Counter[str]()
    for number, (operation, way) in enumerate(cases, start=1):
        fault = _case(source, folder / "broken", operation, way, reference)
        ended[way] += 1
        if fault is not None:
            failed.append({"how": way, "operation": f"{operation.kind} {operation.path}", "fault": fault})
            report(f"{way} at {operation.number} ({operation.kind} {operation.path}): {fault}")
        if number % 50 == 0 or number == len(cases):
            report(f"{number} of {len(cases)} cases, {len(failed)} failed")
    kinds = Counter(operation.kind for operation in operations)
    return {"operations": dict(kinds), "cases": dict(ended), "failed": failed}


def _case(source: Path, run: Path, at: Operation, how: str, reference: dict[str, bytes]) -> str | None:
    """End a new run at an operation and resume it; returns what is wrong, or None."""
    shutil.rmtree(run, ignore_errors=True)
    log = run.with_suffix(".log")
    status = _forked(_train(source, run), log, KillWatch(run, lambda op, handle: _end(op, at.number, how, handle)))
    if (fault := _wrong_end(how, status, _text(log))) is not None:
        return fault
    stands = (run / "config.yaml").is_file()
    status = _forked(["resume", str(run)] if stands else _train(source, run), log, None)
    if status != 0:
        return f"resumed, it ended with status {status}: {_text(log)[-1000:]}"
    found = contents(run)
    different = sorted(name for name in {*found, *reference} if found.get(name) != reference.get(name))
    if different:
        return f"resumed, it differs in {', '.join(different)}"
    left = [str(path.relative_to(run)) for path in run.rglob(".*") if path.name not in _KEPT]
    return f"left behind: {', '.join(left)}" if left else None


def _wrong_end(how: str, status: int, printed: str) -> str | None:
    if how in ("kill", "torn"):
        return None if status == -signal.SIGKILL else f"ended with status {status}: {printed[-1000:]}"
    if "Traceback" in printed:
        return f"a traceback: {printed[-1000:]}"
    # An operation that may fail without harm does not end the run.
    if status == 0 and how == "full":
        return None
    wanted, words = (143, "stopped by SIGTERM; ") if how == "signal" else (1, "error: the disk is full: no room to ")
    onward = "`flowgrpo resume" in printed or "start it again" in printed
    return None if status == wanted and words in printed and onward else f"status {status}: {printed[-1000:]}"


def _end(operation: Operation, number: int, how: str, handle: int | None) -> None:
    """At operation `number`, end this process or let the operation fail."""
    if how == "full" and operation.number >= number:
        # From here on, nothing more can be written. To shrink or rename a file still works on a full disk.
        if operation.number == number or operation.kind in ("open", "os.mkdir", "fsync"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), None if handle is not None else operation.path)
    elif operation.number == number:
        if how == "torn" and handle is not None and os.path.isfile(f"/proc/self/fd/{handle}"):
            size = os.fstat(handle).st_size
            # If a file is appended to, only its new end can be lost.
            os.truncate(f"/proc/self/fd/{handle}", max(size - 7, 0) if operation.path.endswith("l") else size // 2)
        os.kill(os.getpid(), signal.SIGTERM if how == "signal" else signal.SIGKILL)


def _train(source: Path, run: Path) -> list[str]:
    return ["train", str(source), "--out", str(run)]


def _forked(words: list[str], log: Path, watch: KillWatch | None) -> int:
    """The exit status of the command in a new process; if a signal killed it, the negative number of the signal."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        _command(words, log, watch)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    except BaseException:
        # A signal ends this process, and nothing else would end the other one.
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        raise


def _command(words: list[str], log: Path, watch: KillWatch | None) -> NoReturn:
    status = 1
    try:
        _forget_handlers()
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.argv = ["flowgrpo", *words]
        if watch is not None:
            watch.begin()
        runpy.run_module(__name__.partition(".")[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _forget_handlers() -> None:
    """Hear signals as a process does that a shell has started."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _read(line: str) -> Operation:
    number, kind, path = line.split("\t", 2)
    return Operation(int(number), kind, path)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")
