"""Reactions to single samples: the favourites of the gallery, from the file that its page saves.

The page saves marks (favourites and notes) as JSON. A mark names its sample by phase, prompt, seed and place, and the
index of the run's samples says which picture that is. docs/gallery.md describes both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..intake.json_text import parse_json
from .lines import check_image, lined_up, read_jsonl

Place = tuple[str, str, str, int]
"""Phase, prompt, seed, and number among the samples of the three; as a mark has them."""


@dataclass(frozen=True, order=True)
class Reaction:
    """A sample that a person has seen: the picture of a prompt, and whether it is a favourite."""

    prompt: str
    file: Path
    frames: int  # above 1 for a video, whose frames stand side by side in the picture
    loved: bool


def read_reactions(marks: Path, runs: Sequence[Path]) -> list[Reaction]:
    """Return the reactions to the samples of runs, sorted.

    A prompt with a mark has been looked at: its marked samples, and the others that stand beside them, of the same
    iteration. A favourite was loved, and the rest was not. Prompts without a mark say nothing. A mark on a sample of
    training belongs to its iteration. A mark on a card of evaluations belongs to the last evaluation of the card.

    Args:
        marks: the file that the page of the gallery has saved.
        runs: folders of the runs whose samples are taken.

    Raises:
        ValueError: the file is no file of marks, it has no marks of a run, or a mark has no picture.
    """
    entries = _entries(marks)
    found: set[Reaction] = set()
    for run in runs:
        own = [entry for entry in entries if entry.get("folder") == run.resolve().name]
        if len(own) != 1 or not isinstance(own[0].get("marks"), list):
            named = ", ".join(str(entry.get("folder")) for entry in entries) or "none"
            raise ValueError(f"{marks} has no marks of the run {run}; it has marks of the folders {named}")
        found |= _of_run(own[0]["marks"], run, marks)
    return sorted(found)


def _entries(path: Path) -> list[Mapping[str, Any]]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a file of marks: {error}") from None
    runs = content.get("runs") if isinstance(content, dict) and content.get("flowgrpo") == "marks" else None
    if not isinstance(runs, list):
        raise ValueError(f"{path} is no file of marks; save one with “Save to a file” of the gallery")
    return [entry for entry in runs if isinstance(entry, dict)]


def _of_run(marks: Sequence[Any], run: Path, source: Path) -> set[Reaction]:
    shots = samples_by_place(run / "samples" / "index.jsonl")
    loved: set[tuple[Place, int]] = set()
    seen: set[tuple[str, str, int]] = set()
    for mark in marks:
        given = mark if isinstance(mark, dict) else {}
        place = (str(given.get("phase")), str(given.get("prompt")), str(given.get("seed")), given.get("sample") or 0)
        iterations = shots.get(place, {})
        at = given.get("iteration")
        at = max(iterations, default=None) if at is None else at
        if at not in iterations:
            raise ValueError(f"{source}: the mark on seed {place[2]} of {place[1]!r:.80} has no sample in {run}")
        seen.add((place[0], place[1], at))
        if given.get("favourite") is True:
            loved.add((place, at))
    return {
        _reaction(record, run, (place, at) in loved)
        for place, iterations in shots.items()
        for at, record in iterations.items()
        if (place[0], place[1], at) in seen
    }


def _reaction(record: Mapping[str, Any], run: Path, loved: bool) -> Reaction:
    samples = (run / "samples").resolve()
    where = f"{run}, seed {record.get('seed')} of {record['prompt']!r:.80}"
    if "image" not in record:
        raise ValueError(f"{where}: the sample is a completion, and reactions are learned from pictures only")
    file, frames = samples / check_image(record["image"], samples, where), record.get("frames", 1)
    if not file.is_file():
        raise ValueError(f"{where}: the picture {file} is gone; put it back, or take the mark out")
    return Reaction(record["prompt"], file, frames if type(frames) is int and frames > 1 else 1, loved)


def samples_by_place(index: Path) -> dict[Place, dict[int, dict[str, Any]]]:
    """Return the records of an index of samples by their places, and within a place by iteration.

    Samples of one phase, prompt and seed are numbered as the gallery numbers them: prompt by prompt of the prompt file,
    and within an iteration by their `sample`.

    Raises:
        ValueError: there is no such file.
    """
    if not index.is_file():
        raise ValueError(f"there is no file {index}; name the folder of a run that has samples")
    names = ("phase", "prompt_id", "seed", "prompt")
    keyed = (
        (tuple(str(record.get(name)) for name in names), record["iteration"], record.get("sample", 0), record)
        for _, record in read_jsonl(index)[0]
        if record.get("phase") in ("eval", "train") and type(record.get("iteration")) is int
    )
    found: dict[Place, dict[int, dict[str, Any]]] = {}
    before = Counter[tuple[str, str, str]]()
    for (phase, _, seed, prompt), iterations in lined_up(keyed):
        found[phase, prompt, seed, before[phase, prompt, seed]] = iterations
        before[phase, prompt, seed] += 1
    return found
