"""Writes people's choices as a folder of preferences, with copies of the images, for use by other programs."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..votes.preferences import Preference, read_preferences, unreadable_note
from .build import read_runs
from .page_files import copy_by_content, write_new
from .vote_pairs import folder_of


def write_preferences(folders: Sequence[Path], path: Path, out: Path) -> tuple[Path, list[str]]:
    """Write the preferences among these runs as a folder that `datasets.load_dataset` reads.

    A row has `prompt`, `chosen`, `rejected` and `seed`; `chosen_run`, `chosen_iteration`, `rejected_run` and
    `rejected_iteration`; `session` and `time`; and `column_NAME` for each column of the prompt file. The rows of text
    are in `data.jsonl`. The rows of images are in `metadata.jsonl`, and each image is copied once. Such a row has
    `chosen_file_name` and `rejected_file_name`, which the reader `imagefolder` opens as `chosen` and `rejected`. If
    there are videos, it has `chosen_frames` and `rejected_frames`: how many stand side by side in the image, 1 for a
    picture.

    Returns:
        The folder, and lines that say what was left out.

    Raises:
        ValueError: see `read_runs` and `read_votes`; the folder exists; or there is no preference to write.
    """
    runs = read_runs(folders)
    if out.exists():
        raise ValueError(f"{out} exists; name a new folder")
    known = {folder_of(run, path.parent) for run in runs}
    every = read_preferences(path)
    here = [one for one in every if {one.vote.left.folder, one.vote.right.folder} <= known]
    rows = [one for one in here if one.vote.left.unchanged(path.parent) and one.vote.right.unchanged(path.parent)]
    if not rows:
        raise ValueError(
            f"{path} has no preference to write: {len(every)} in all, {len(here)} on these runs, and in none of these "
            "both samples are unchanged; vote first, or name the runs that were voted on"
        )
    columns = sorted({column for one in rows for column in one.vote.columns})
    videos = any(side.frames for one in rows for side in (one.vote.left, one.vote.right))

    def write(folder: Path) -> None:
        folder.mkdir()
        lines = [json.dumps(_row(one, folder, columns, videos)) + "\n" for one in rows]
        (folder / ("data.jsonl" if runs[0].text else "metadata.jsonl")).write_text("".join(lines), encoding="utf-8")

    unread = unreadable_note(path)
    notes = [] if unread is None else [unread]
    if len(every) > len(here):
        notes.append(f"left out: {len(every) - len(here)} preferences on other runs")
    if len(here) > len(rows):
        notes.append(f"left out: {len(here) - len(rows)} preferences whose images are missing or have changed")
    try:
        return write_new(out, write), notes
    finally:
        for left in out.parent.glob(f".{out.name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)


def _row(one: Preference, folder: Path, columns: Sequence[str], videos: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": one.prompt}
    sides = one.vote.preferred
    assert sides is not None
    for word, sample, side in zip(("chosen", "rejected"), one[1:3], sides):
        if isinstance(sample, Path):
            row[f"{word}_file_name"] = copy_by_content(sample, side.sha256, folder)
            row |= {f"{word}_frames": side.frames or 1} if videos else {}
        else:
            row[word] = sample
    row["seed"] = one.vote.seed
    for word, side in zip(("chosen", "rejected"), sides):
        row |= {f"{word}_run": side.run, f"{word}_iteration": side.iteration}
    row |= {"session": one.vote.session, "time": one.vote.time}
    return row | {f"column_{name}": one.vote.columns.get(name) for name in columns}
