"""Pairs of the best and the worst of a prompt's samples by a reward, as a folder that other programs read."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..votes.samples import Sample, read_samples
from .page_files import copy_by_content, write_new

INDEX = "index.jsonl"


def write_scored_pairs(folder: Path, out: Path, reward: str | None, gap: float) -> tuple[Path, list[str]]:
    """Write the best and the worst sample of each prompt as a folder that `datasets.load_dataset` reads.

    Samples are compared if one model made them at once for one prompt. The rows have `prompt`, `chosen_score` and
    `rejected_score`, and `column_NAME` for each column of the prompt file. The rows of images are in `metadata.jsonl`,
    with `chosen_file_name` and `rejected_file_name`, and each image is copied once. If there are videos, a row has
    `chosen_frames` and `rejected_frames`. The rows of text are in `data.jsonl`, with `chosen` and `rejected`.

    Args:
        folder: what `flowgrpo sample --out` or `flowgrpo evaluate --out` has written, or a run.
        out: a new folder.
        reward: the reward that compares; None if the samples have only one.
        gap: a pair must differ by more than this.

    Returns:
        The folder, and lines that say how many pairs there are and what was left out.

    Raises:
        ValueError: the folder has no samples, `out` exists, no reward is named and there are several, or there is no
            pair.
    """
    home = next((place for place in (folder, folder / "samples") if (place / INDEX).is_file()), None)
    if home is None:
        raise ValueError(
            f"{folder} has no {INDEX} of samples; name a run, or a folder that `flowgrpo evaluate --out` has written"
        )
    samples, skipped = read_samples(home / INDEX)
    name = _reward(samples, reward, home / INDEX)
    groups, gone = _groups(samples, name)
    pairs = [pair for group in groups if (pair := _pair(group, name, gap)) is not None]
    if not pairs:
        raise ValueError(
            f"{home / INDEX}: no two samples of a prompt differ by more than {gap:g} in reward {name} "
            f"({len(groups)} prompts); make several samples of each prompt, as with evaluate.seeds=4"
        )
    columns = sorted({column for best, _ in pairs for column in best.values})

    def write(place: Path) -> None:
        place.mkdir()
        lines = [json.dumps(_row(*pair, name, columns, home, place)) + "\n" for pair in pairs]
        file = "metadata.jsonl" if pairs[0][0].image else "data.jsonl"
        (place / file).write_text("".join(lines), encoding="utf-8")

    notes = [f"{len(pairs)} pairs of {len(groups)} prompts, by reward {name}"]
    notes += [f"left out: {gone} samples whose images are missing"] if gone else []
    notes += [f"left out: {skipped} lines of {home / INDEX} that cannot be read"] if skipped else []
    return write_new(out, write), notes


def _reward(samples: Sequence[Sample], reward: str | None, index: Path) -> str:
    names = list(dict.fromkeys(name for sample in samples for name in sample.rewards))
    if reward is None and len(names) == 1:
        return names[0]
    if reward not in names:
        asked = "name one of them with --reward" if reward is None else f"and {reward} is not one of them"
        raise ValueError(f"{index}: the samples have the rewards {', '.join(names) or 'of none'}; {asked}")
    return reward


def _groups(samples: Sequence[Sample], reward: str) -> tuple[list[list[Sample]], int]:
    """The scored samples that one model made at once for one prompt, and how many samples have lost their images."""
    groups: dict[tuple[str, int, str, str], dict[tuple[str, int], Sample]] = {}
    gone = 0
    for sample in samples:
        gone += sample.missing is not None
        if sample.missing is None and reward in sample.rewards:
            group = groups.setdefault((sample.phase, sample.iteration, *sample.asked), {})
            # What a resumed run has made again stands twice, and the last one counts.
            group[sample.seed, sample.sample] = sample
    return [list(group.values()) for group in groups.values()], gone


def _pair(group: Sequence[Sample], reward: str, gap: float) -> tuple[Sample, Sample] | None:
    best = max(group, key=lambda sample: sample.rewards[reward])
    worst = min(group, key=lambda sample: sample.rewards[reward])
    return (best, worst) if best.rewards[reward] - worst.rewards[reward] > gap else None


def _row(best: Sample, worst: Sample, reward: str, columns: Sequence[str], home: Path, place: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": best.prompt}
    videos = best.frames > 1 or worst.frames > 1
    for word, sample in (("chosen", best), ("rejected", worst)):
        row |= dict(_shown(word, sample, home, place, videos))
    row |= {"chosen_score": best.rewards[reward], "rejected_score": worst.rewards[reward]}
    return row | {f"column_{name}": best.values.get(name) for name in columns}


def _shown(word: str, sample: Sample, home: Path, place: Path, videos: bool) -> Iterator[tuple[str, Any]]:
    if sample.image is None:
        yield word, sample.completion
        return
    image = home / sample.image
    yield f"{word}_file_name", copy_by_content(image, hashlib.sha256(image.read_bytes()).hexdigest(), place)
    if videos:
        yield f"{word}_frames", sample.frames
