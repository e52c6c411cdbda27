"""The message for a path that is no run folder."""

from __future__ import annotations

import difflib
from pathlib import Path

MOST = 3


def no_run(path: str | Path) -> str:
    """What is wrong with a path that should be a run folder, and which runs are in it or have a name like it."""
    path = Path(path)
    return f"{path} is not a run folder (no config.yaml); {_instead(path)}"


def _instead(path: Path) -> str:
    if inside := _runs(path):
        return f"it holds runs, so name one: {_listed(inside)}"
    beside = {run.name: run for run in _runs(path.parent)}
    if close := difflib.get_close_matches(path.name, beside, n=1, cutoff=0.5):
        return f"did you mean {beside[close[0]]}?"
    return "give one that `flowgrpo train` wrote"


def _runs(folder: Path) -> list[Path]:
    """The run folders of a folder, with the newest first."""
    try:
        found = [one for one in folder.iterdir() if (one / "config.yaml").is_file()]
        return sorted(found, key=lambda run: (-(run / "config.yaml").stat().st_mtime, run.name))
    except OSError:
        return []


def _listed(runs: list[Path]) -> str:
    more = f" or {len(runs) - MOST} older ones" if len(runs) > MOST else ""
    return ", ".join(map(str, runs[:MOST])) + more
