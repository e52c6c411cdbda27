"""Writes people's choices as a folder of preferences, with copies of the images, for use by other programs."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..votes.preferences import Preference, read_preferences, unreadable_note
from .build import read_runs
from .page_files import copy_by_content, write_new
from .prompt_columns import SIDES, PromptColumns
from .vote_pairs import folder_of
from .voted_samples import VotedSamples


def write_preferences(folders: Sequence[Path], path: Path, out: Path) -> tuple[Path, list[str]]:
    """Write the preferences among these runs as a folder that `datasets.load_dataset` reads.

    A row has `prompt` (a conversation if it was one), `image`, `mask_image` and so on with copies of the prompt's
    pictures, `height` and `width`, each where the prompt has it; `chosen`, `rejected` and `seed`; `chosen_run`,
    `chosen_iteration`, `rejected_run` and `rejected_iteration`; `session` and `time`; and `column_NAME` for each other
    column of the prompt file. The rows of text are in `data.jsonl`. The rows of images are in `metadata.jsonl`, and
    each image is copied once. Such a row has `chosen_file_name` and `rejected_file_name`, which the reader
    `imagefolder` opens as `chosen` and `rejected`. If there are videos, it has `chosen_frames` and `rejected_frames`:
    how many stand side by side in the image, 1 for a picture.

    Returns:
        The folder, and lines that say what was left out, and which pictures of prompts may not be the files that the
        prompts name.

    Raises:
        ValueError: see `read_runs` and `read_votes`; the folder exists; there is no preference to write; or a
            picture of a prompt is missing.
    """
    runs = read_runs(folders)
    if out.exists():
        raise ValueError(f"{out} exists; name a new folder")
    known = {folder_of(run, path.parent) for run in runs}
    every = read_preferences(path)
    here = [one for one in every if {one.vote.left.folder, one.vote.right.folder} <= known]
    same = [one for one in here if one.vote.left.unchanged(path.parent) and one.vote.right.unchanged(path.parent)]
    samples = VotedSamples(runs, path.parent)
    rows = [whole for one in same if (whole := _completed(one, samples)) is not None]
    if not rows:
        raise ValueError(
            f"{path} has no preference to write: {len(every)} in all, {len(here)} on these runs, and in none of these "
            "both samples are unchanged; vote first, or name the runs that were voted on"
            if not same
            else f"{path} has no preference to write: an earlier version made its {len(same)} choices on these runs, "
            "and kept only the last message of a prompt; the runs no longer have the samples, so vote again"
        )
    columns = sorted({column for one in rows for column in one.vote.columns} - {*SIDES})
    videos = any(side.frames for one in rows for side in (one.vote.left, one.vote.right))

    remarks: list[str] = []

    def write(folder: Path) -> None:
        folder.mkdir()
        asked = PromptColumns(folder)
        lines = [json.dumps(_row(one, path.parent, folder, columns, videos, asked)) + "\n" for one in rows]
        remarks.extend(asked.notes())
        (folder / ("data.jsonl" if runs[0].text else "metadata.jsonl")).write_text("".join(lines), encoding="utf-8")

    unread = unreadable_note(path)
    notes = [] if unread is None else [unread]
    if len(every) > len(here):
        notes.append(f"left out: {len(every) - len(here)} preferences on other runs")
    if len(here) > len(same):
        notes.append(f"left out: {len(here) - len(same)} preferences whose images are missing or have changed")
    if len(same) > len(rows):
        notes.append(
            f"left out: {len(same) - len(rows)} preferences of an earlier version, which kept only the last message of "
            "a prompt, and whose samples the runs no longer have; vote on these prompts again"
        )
    try:
        written = write_new(out, write)
        return written, notes + remarks
    finally:
        for left in out.parent.glob(f".{out.name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)


def _completed(one: Preference, samples: VotedSamples) -> Preference | None:
    """A preference with everything that was asked.

    Earlier versions did not keep conversations, pictures and the types of columns; the run has them. None if the run no
    longer has the sample.
    """
    vote = one.vote
    if vote.messages is not None and vote.pictures is not None and vote.values is not None:
        return one
    shot = samples.sample(vote.left)
    if shot is None or shot.prompt != vote.prompt:
        return None
    pictures = tuple(f"samples/{name}" for name in shot.pictures)
    whole = replace(vote, messages=shot.messages, pictures=pictures, values=shot.values, columns=shot.columns)
    return one._replace(vote=whole)


def _row(
    one: Preference, home: Path, folder: Path, columns: Sequence[str], videos: bool, asked: PromptColumns
) -> dict[str, Any]:
    vote, sides = one.vote, one.vote.preferred
    assert sides is not None
    values = vote.values or {}
    pictures = [home / vote.left.folder / name for name in vote.pictures or ()]
    row = asked.of(one.prompt, vote.messages or (), values, pictures)
    for word, sample, side in zip(("chosen", "rejected"), one[1:3], sides):
        if isinstance(sample, Path):
            row[f"{word}_file_name"] = copy_by_content(sample, side.sha256, folder)
            row |= {f"{word}_frames": side.frames or 1} if videos else {}
        else:
            row[word] = sample
    row["seed"] = vote.seed
    for word, side in zip(("chosen", "rejected"), sides):
        row |= {f"{word}_run": side.run, f"{word}_iteration": side.iteration}
    row |= {"session": vote.session, "time": vote.time}
    return row | {f"column_{name}": values.get(name) for name in columns}
