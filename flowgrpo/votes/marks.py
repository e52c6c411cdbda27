"""Reactions to single samples: the favourites of the gallery, from the file that its page saves.

The page saves marks (favourites and notes) as JSON. A mark names its sample by phase, prompt, seed and place, and the
index of the run's samples says which sample that is. docs/gallery.md describes both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..intake.json_text import parse_json
from .samples import Place, Sample, by_place, pair_samples, read_samples


@dataclass(frozen=True)
class Reaction:
    """A sample that a person has seen, and whether it is a favourite."""

    run: Path  # folder of the run
    sample: Sample
    loved: bool


def read_reactions(marks: Path, runs: Sequence[Path]) -> list[Reaction]:
    """Return the reactions to the samples of runs, in the order of the runs and their samples.

    A prompt with a mark has been looked at: its marked samples, and the others that stand beside them, of the same
    iteration. A favourite was loved, and the rest was not. Prompts without a mark say nothing. A mark on a sample of
    training belongs to its iteration. A mark on a card of evaluations belongs to the last evaluation of the card.

    Args:
        marks: the file that the page of the gallery has saved.
        runs: folders of the runs whose samples are taken. A run that is named twice counts once.

    Raises:
        ValueError: the file is no file of marks, it has no marks of a run, two runs have the same folder name, a mark
            has no sample, the picture of a sample is gone, or a run has no samples that can be read.
    """
    entries = _entries(marks)
    found: list[Reaction] = []
    known: dict[str, Path] = {}
    for run in {folder.resolve(): folder for folder in runs}.values():
        name = run.resolve().name
        own = [entry for entry in entries if entry.get("folder") == name]
        # A file of marks names a run by its folder's name alone.
        if name in known or len(own) > 1:
            both = f"the runs {known[name]} and {run} have" if name in known else f"{marks} has marks of two runs with"
            raise ValueError(
                f"{both} the same folder name {name}, so their marks cannot be told apart; rename a folder, and save "
                "the marks again from its gallery"
            )
        known[name] = run
        if not own or not isinstance(own[0].get("marks"), list):
            named = ", ".join(str(entry.get("folder")) for entry in entries) or "none"
            raise ValueError(f"{marks} has no marks of the run {run}; it has marks of the folders {named}")
        found += _of_run(own[0]["marks"], run, marks)
    return found


def _entries(path: Path) -> list[Mapping[str, Any]]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}; save your marks with “Save to a file” of the gallery")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a file of marks: {error}") from None
    runs = content.get("runs") if isinstance(content, dict) and content.get("flowgrpo") == "marks" else None
    if not isinstance(runs, list):
        raise ValueError(f"{path} is no file of marks; save one with “Save to a file” of the gallery")
    return [entry for entry in runs if isinstance(entry, dict)]


def _of_run(marks: Sequence[Any], run: Path, source: Path) -> list[Reaction]:
    index = run / "samples" / "index.jsonl"
    if not index.is_file():
        raise ValueError(f"there is no file {index}; name the folder of a run that has samples")
    pairs = by_place(pair_samples(read_samples(index)[0]))
    loved: set[tuple[Place, int]] = set()
    seen: set[tuple[str, tuple[str, str], int]] = set()
    for mark in marks:
        given = mark if isinstance(mark, dict) else {}
        place = (str(given.get("phase")), str(given.get("prompt")), str(given.get("seed")), given.get("sample") or 0)
        iterations = pairs[place].shots if isinstance(place[3], int) and place in pairs else {}
        at = given.get("iteration")
        at = max(iterations, default=None) if at is None else at
        if at not in list(iterations):  # the file may have something that is not hashable
            raise ValueError(f"{source}: the mark on seed {place[2]} of {place[1]!r:.80} has no sample in {run}")
        seen.add((place[0], pairs[place].first.asked, at))
        if given.get("favourite") is True:
            loved.add((place, at))
    found = [
        Reaction(run, sample, (place, at) in loved)
        for place, pair in pairs.items()
        for at, sample in pair.shots.items()
        if (place[0], sample.asked, at) in seen
    ]
    for sample in (one.sample for one in found):
        if sample.missing:
            raise ValueError(
                f"{run}, seed {sample.seed} of {sample.prompt!r:.80}: the picture {run / 'samples' / sample.missing} "
                "is gone; put it back, or take the mark out"
            )
    return found
