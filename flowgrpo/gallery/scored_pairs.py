"""Pairs of the best and the worst of a prompt's samples by a reward, as a folder that other programs read."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..votes.samples import Sample, read_samples
from .page_files import copy_by_content, write_new
from .prompt_columns import SIDES, PromptColumns, digest_of

INDEX = "index.jsonl"
TRAIN = "train"


def write_scored_pairs(folder: Path, out: Path, reward: str | None, gap: float) -> tuple[Path, list[str]]:
    """Write the best and the worst sample of each prompt as a folder that `datasets.load_dataset` reads.

    Samples are compared if one model made them at once for one prompt. Of a run, only training samples are taken, so
    that no held-out prompt becomes a training prompt. Completions that were cut at the longest length are left out.

    The rows have `prompt` (a conversation if it was one), `image`, `mask_image` and so on with copies of the prompt's
    pictures, `height` and `width`, each where the prompt has it; `chosen_score` and `rejected_score`; and `column_NAME`
    for each other column of the prompt file. The rows of images are in `metadata.jsonl`, with `chosen_file_name` and
    `rejected_file_name`, and each image is copied once. If there are videos, a row has `chosen_frames` and
    `rejected_frames`. The rows of text are in `data.jsonl`, with `chosen` and `rejected`.

    Args:
        folder: what `flowgrpo evaluate --out` has written, or a run.
        out: a new folder.
        reward: the reward that compares; None if the samples have only one.
        gap: a pair must differ by more than this.

    Returns:
        The folder, and lines that say how many pairs there are, what was left out, and which pictures of prompts may
        not be the files that the prompts name.

    Raises:
        ValueError: the folder has no samples or has sounds, `out` exists, no reward is named and there are several,
            there is no pair, or a picture of a prompt is missing.
    """
    home = next((place for place in (folder, folder / "samples") if (place / INDEX).is_file()), None)
    if home is None:
        raise ValueError(
            f"{folder} has no {INDEX} of samples; name a run, or a folder that `flowgrpo evaluate --out` has written"
        )
    every, skipped = read_samples(home / INDEX)
    if any(sample.sound for sample in every):
        raise ValueError(f"{home / INDEX} has sounds, and a run cannot train on pairs of sounds; name a run of images")
    trained = [sample for sample in every if sample.phase == TRAIN]
    samples = [sample for sample in trained or every if sample.missing is None and not sample.truncated]
    name = _reward(every, reward, home / INDEX)
    groups = _groups(samples, name)
    pairs = [pair for group in groups if (pair := _pair(group, name, gap)) is not None]
    prompts = len({group[0].asked for group in groups})
    if not pairs:
        raise ValueError(
            f"{home / INDEX}: no two samples of a prompt differ by more than {gap:g} in reward {name} "
            f"({prompts} prompts); {_several(groups)}"
        )
    columns = sorted({column for best, _ in pairs for column in best.values} - {*SIDES})
    written: list[str] = []
    remarks: list[str] = []

    def write(place: Path) -> None:
        place.mkdir()
        asked = PromptColumns(place)
        # A model that hardly changes makes the same samples again.
        written.extend(
            dict.fromkeys(json.dumps(_row(*pair, name, columns, home, place, asked)) + "\n" for pair in pairs)
        )
        remarks.extend(asked.notes())
        file = "metadata.jsonl" if pairs[0][0].image else "data.jsonl"
        (place / file).write_text("".join(written), encoding="utf-8")

    path = write_new(out, write)
    left = {
        "held-out samples, because the run has training samples": len(every) - len(trained) if trained else 0,
        "samples whose images are missing": sum(sample.missing is not None for sample in trained or every),
        "completions that were cut at the longest length": sum(sample.truncated for sample in trained or every),
        "pairs that are there already": len(pairs) - len(written),
        f"lines of {home / INDEX} that cannot be read": skipped,
    }
    notes = [f"{len(written)} pairs of {prompts} prompts, by reward {name}"]
    return path, notes + [f"left out: {count:,} {what}" for what, count in left.items() if count] + remarks


def _several(groups: Sequence[Sequence[Sample]]) -> str:
    """What to write so that the samples of a prompt differ."""
    texts = [{sample.completion for sample in group} for group in groups if len(group) > 1]
    if any(None not in one for one in texts) and all(len(one) == 1 for one in texts):
        return "the completions of each prompt are equal; sample them with evaluate.temperature=1"
    return "make several samples of each prompt, as with evaluate.seeds=4"


def _reward(samples: Sequence[Sample], reward: str | None, index: Path) -> str:
    names = list(dict.fromkeys(name for sample in samples for name in sample.rewards))
    if reward is None and len(names) == 1:
        return names[0]
    if reward not in names:
        asked = "name one of them with --reward" if reward is None else f"and {reward} is not one of them"
        raise ValueError(f"{index}: the samples have the rewards {', '.join(names) or 'of none'}; {asked}")
    return reward


def _groups(samples: Sequence[Sample], reward: str) -> list[list[Sample]]:
    """The scored samples that one model made at once for one prompt."""
    groups: dict[tuple[str, int, str, str], dict[tuple[str, int], Sample]] = {}
    for sample in samples:
        if reward in sample.rewards:
            group = groups.setdefault((sample.phase, sample.iteration, *sample.asked), {})
            # What a resumed run has made again stands twice, and the last one counts.
            group[sample.seed, sample.sample] = sample
    return [list(group.values()) for group in groups.values()]


def _pair(group: Sequence[Sample], reward: str, gap: float) -> tuple[Sample, Sample] | None:
    best = max(group, key=lambda sample: sample.rewards[reward])
    worst = min(group, key=lambda sample: sample.rewards[reward])
    return (best, worst) if best.rewards[reward] - worst.rewards[reward] > gap else None


def _row(
    best: Sample, worst: Sample, reward: str, columns: Sequence[str], home: Path, place: Path, asked: PromptColumns
) -> dict[str, Any]:
    row = asked.of(best.prompt, best.messages, best.values, [home / picture for picture in best.pictures])
    videos = best.frames > 1 or worst.frames > 1
    for word, sample in (("chosen", best), ("rejected", worst)):
        row |= dict(_shown(word, sample, home, place, videos))
    row |= {"chosen_score": best.rewards[reward], "rejected_score": worst.rewards[reward]}
    return row | {f"column_{name}": best.values.get(name) for name in columns}


def _shown(word: str, sample: Sample, home: Path, place: Path, videos: bool) -> Iterator[tuple[str, Any]]:
    if sample.image is None:
        yield word, sample.completion
        return
    yield f"{word}_file_name", copy_by_content(home / sample.image, digest_of(home / sample.image), place)
    if videos:
        yield f"{word}_frames", sample.frames
