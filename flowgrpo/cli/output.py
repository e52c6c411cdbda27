"""Helpers of the commands: printing, and checks of the paths to write."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console

from ..intake.visible import visible


def make_console() -> Console:
    """The console of the commands. In a cell of a notebook no line moves, because a notebook keeps what is erased."""
    # A kernel gives its commands a terminal, and says in these two variables that it is a kernel.
    kernel = "JPY_PARENT_PID" in os.environ or "matplotlib_inline" in os.environ.get("MPLBACKEND", "")
    return Console(force_interactive=False if kernel else None)


console = make_console()


def say(text: str) -> None:
    """Print a line as it is: names and prompts are not markup, and no commands to a terminal."""
    console.print(visible(text), highlight=False, markup=False, emoji=False, soft_wrap=True)


def output_file(path: Path | None, kind: str | None = None) -> None:
    """Refuse a file that could not be written, before any work is done for it.

    Args:
        path: the file; None for no file.
        kind: the ending of the file. A file of another kind is never replaced, because it may be anything of the
            user's.

    Raises:
        ValueError: the path is a folder, lies below a file or in a folder that cannot be written, or is an existing
            file of another kind.
    """
    if path is not None:
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name a file")
        if kind is not None and path.exists() and path.suffix != kind:
            raise ValueError(f"{path} exists and is no {kind} file; name a file that ends in {kind}")
        _refuse_place(path)


def output_folder(path: Path | None) -> None:
    """Refuse a folder that could not be made, before any work is done for it.

    Raises:
        ValueError: the path is a file, or lies below a file or in a folder that cannot be written.
    """
    if path is not None:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; name a folder")
        _refuse_place(path)


def _refuse_place(path: Path) -> None:
    """Refuse a path below a file, or in a folder that this user may not write in."""
    for parent in path.parents:
        if parent.exists():
            if not parent.is_dir():
                raise ValueError(f"{path} lies below {parent}, which is a file; name another place")
            if not path.exists() and not os.access(parent, os.W_OK):
                raise ValueError(f"{path} cannot be made, because {parent} may not be written in; name another place")
            return


def is_first() -> bool:
    """Whether this is the first of the processes that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def say_first(line: str) -> None:
    """Print a line, unless this is another process than the first one."""
    if is_first():
        say(line)


def timed_report() -> Callable[[str], None]:
    """A function that prints lines, each with the seconds since `timed_report` was called."""
    began = time.perf_counter()
    return lambda text: say(f"{time.perf_counter() - began:7.0f} s  {text}")


def refuse_without(given: Mapping[str, object], owner: str) -> None:
    """Refuse options that would be ignored, because they belong to an option that is not given.

    Raises:
        ValueError: an option of `given` has a true value.
    """
    for name in (name for name, value in given.items() if value):
        raise ValueError(f"{name} belongs to {owner}; add {owner}, or leave {name} out")


def refuse_idle(given: Mapping[str, object], where: str) -> None:
    """Refuse options that would be ignored; `where` says in which case.

    Raises:
        ValueError: an option of `given` has a true value.
    """
    for name in (name for name, value in given.items() if value):
        raise ValueError(f"{name} has no effect {where}; leave {name} out")


def summary_lines(found: Mapping[str, tuple[float, float, int]], noun: str) -> Iterator[str]:
    """A line for each reward: its mean, its standard error over prompts, and the number of samples.

    Args:
        found: reward -> these three.
        noun: what a sample is called.
    """
    for name, (mean, error, count) in found.items():
        if count == 0:
            yield f"{name}: applies to no {noun}"
            continue
        spread = f"{error:.4f}" if math.isfinite(error) else "–"
        yield f"{name}: {mean:.4f} ± {spread} ({count} {noun}{'s' * (count != 1)})"
