"""What a killed process leaves behind in a run folder: half-written files, and folders under temporary names.

Only names that this package gives are touched, and only by the process that holds the lock of the folder.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

RESULTS = ("lora", "pipeline", "model")
BEST = "best"
"""Folder of the weights of the best evaluation so far."""
UNFINISHED, REPLACED, DROPPED, DAMAGED = ".tmp-", ".old-", ".drop-", "damaged-"
"""Prefixes of the names of checkpoints that are being written, being replaced, being removed, or damaged."""

_FILES = ("*/.*.png.tmp", "prompts/.*.webp.*.tmp", ".index.jsonl.*.tmp")
_WORKPLACE = re.compile(rf"\.({'|'.join((*RESULTS, BEST))})\.[a-z0-9_]{{8}}")


def clear(run: Path) -> None:
    """Finish or undo what a killed process was doing in a run folder, and remove its temporary files."""
    for name in (".config.yaml.*.tmp", ".metrics.jsonl.*.tmp", ".trackers.json.*.tmp"):
        remove(*run.glob(name))
    for name in _FILES:
        remove(*(run / "samples").glob(name))
    remove(*(run / "failed").glob(".*.partial"))
    remove(*(run / "recipes").glob("*/.config.yaml.*.tmp"))
    for folder in run.glob(".*"):
        if (match := _WORKPLACE.fullmatch(folder.name)) is not None and folder.is_dir():
            _put_back(folder / "old", run / match[1])
            remove(folder)
    checkpoints = run / "checkpoints"
    for folder in checkpoints.glob(f"{REPLACED}*"):
        _put_back(folder, checkpoints / f"iter-{folder.name.removeprefix(REPLACED)}")
    for kind in (UNFINISHED, REPLACED, DROPPED):
        remove(*checkpoints.glob(f"{kind}*"))


def _put_back(old: Path, target: Path) -> None:
    """Rename a folder back, if it was moved aside and nothing replaced it."""
    if old.is_dir() and not target.exists():
        os.replace(old, target)


def remove(*paths: Path) -> None:
    """Remove files and folders that may be there."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
