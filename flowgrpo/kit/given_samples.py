"""Rewards of pictures, videos or completions that exist already, for `flowgrpo rewards score` and `compare`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..inference.inference import progress, silent, summaries
from ..rewards.base import RewardError, RewardSpec
from ..rewards.runner import RewardBatch, RewardSet
from ..rewards.score_batches import join_scores
from ..training.data import PromptRow, read_prompts
from ..training.evaluating import Scored
from ..training.folder.files import writing
from .folder import FILE_KEYS, METADATA, LabelledPicture, inner_columns, listed_picture, load, read_folder

BATCH = 64
"""About how many samples are scored at once; a group is not divided."""

Summary = dict[str, tuple[float, float, int]]
"""Reward -> mean, its standard error over prompts, and the number of samples to which the reward applies."""


@dataclass(frozen=True)
class GivenSample:
    """A sample that exists already.

    Attributes:
        prompt: its prompt.
        columns: further columns, for rewards.
        made: a completion, or a picture that is still to be loaded.
        line: what the list of samples says about it; empty for a picture without a list.
    """

    prompt: str
    columns: dict[str, Any]
    made: str | LabelledPicture
    line: dict[str, Any]

    @property
    def kind(self) -> str:
        """The moment of a run at which the sample was made, in words; "" for samples from elsewhere."""
        phase, iteration = self.line.get("phase"), self.line.get("iteration")
        if not isinstance(phase, str) or not isinstance(iteration, int):
            return ""
        return f"{phase}, after {iteration} iterations: "

    @property
    def group(self) -> tuple[str, str, Any]:
        """What the samples of a group have in common: the moment, the prompt, and its number in the prompt file.

        Prompts with other pictures may have the same words.
        """
        return self.kind, self.prompt, self.line.get("prompt_id")

    def shown(self) -> dict[str, str]:
        """The completion, or the path of the picture."""
        return {"completion": self.made} if isinstance(self.made, str) else {"image": str(self.made.path)}

    def record(self) -> dict[str, Any]:
        """The sample for a list in which the reward's scores are added."""
        return dict(self.line) if self.line else {"prompt": self.prompt, **self.shown(), "columns": self.columns}


def given_samples(source: Path, metadata: Path | None = None) -> list[GivenSample]:
    """The samples of a run, of a folder that `sample` or `evaluate --out` wrote, or of a folder or list from elsewhere.

    Args:
        source: a run folder; a folder of pictures; a folder with a list (`index.jsonl`, `metadata.jsonl` or
            `metadata.csv`); or the list itself: a prompt file with a column `completion`, or with the path of a
            picture, relative to the list, in `file_name`, `file`, `image` or `path`.
        metadata: the list of a folder of pictures, if it is elsewhere or has another name.

    Raises:
        ValueError: there is nothing to score, or a list names no sample in one of its rows.
    """
    if (source / "samples" / "index.jsonl").is_file():
        source = source / "samples"
    if source.is_dir() and metadata is None:
        metadata = next((source / name for name in METADATA if (source / name).is_file()), None)
    listed = metadata or (source if source.is_file() else None)
    if listed is None:
        return [GivenSample(one.prompt, one.columns, one, {}) for one in read_folder(source)]
    found = [_given(listed, row) for row in read_prompts(str(listed))]
    if len({isinstance(one.made, str) for one in found}) > 1:
        raise ValueError(f"{listed} has pictures and completions; put them into two lists")
    return found


def _given(listed: Path, row: PromptRow) -> GivenSample:
    text, line = row.columns.get("completion"), {"prompt": row.text, **row.columns}
    if isinstance(text, str):
        return GivenSample(row.text, inner_columns(row, "completion"), text, line)
    if not any(isinstance(row.columns.get(key), str) for key in FILE_KEYS):
        raise ValueError(
            f"{listed}: prompt {row.id + 1} has neither a text in a column `completion` nor a picture in a column "
            f"`file_name` (it has {', '.join(['prompt', *row.columns])})"
        )
    picture = listed_picture(listed, row)
    return GivenSample(row.text, picture.columns, picture, line)


def score_samples(
    specs: Sequence[RewardSpec],
    samples: Sequence[GivenSample],
    out: Path | None = None,
    say: Callable[[str], None] = silent,
) -> dict[str, Summary]:
    """Score samples with every reward; the summaries are in the order of the samples, by `GivenSample.kind`.

    Args:
        specs: the rewards.
        samples: as for `scores_of`.
        out: as for `scores_of`.
        say: called with lines that say how much is done.

    Raises:
        ValueError: as in `scores_of`.
        RewardError: a reward failed; what was scored before is in `out`.
    """
    return _by_kind(samples, scores_of(specs, samples, out, say))


def scores_of(
    specs: Sequence[RewardSpec],
    samples: Sequence[GivenSample],
    out: Path | None = None,
    say: Callable[[str], None] = silent,
) -> RewardBatch:
    """The scores of samples by every reward, in the order of the samples.

    Samples of one prompt and one kind are a group, for rewards that compare samples.

    Args:
        specs: the rewards.
        samples: all of them pictures and videos, or all of them completions.
        out: file that gets a line for each sample as soon as it is scored: the line of its list, with the scores in
            `rewards`, `sub_scores`, `notes` and `parts`, beside scores of other rewards that are there already.
        say: called with lines that say how much is done.

    Raises:
        ValueError: a reward cannot be made, does not take these samples, or needs a column that they lack.
        RewardError: a reward failed; what was scored before is in `out`.
    """
    rewards = RewardSet(specs)
    names = list(dict.fromkeys(name for sample in samples for name in sample.columns))
    what = "completions" if isinstance(samples[0].made, str) else "images"
    for reward in rewards.rewards:
        reward.check(what, names, grouped=True)
    seen, done = progress(len(samples), say), 0
    places, parts = list[int](), list[RewardBatch]()
    try:
        for rows, groups in _batches(samples):
            parts.append(_scored(rewards, [samples[row] for row in rows], names, groups, done))
            places += rows
            if out is not None:
                _append(out, [samples[row] for row in rows], parts[-1])
            done += len(rows)
            seen(done)
    except (RewardError, OSError):
        if out is not None and done:
            say(f"{done} of {len(samples)} samples are scored in {out}")
        raise
    finally:
        rewards.close()
    return join_scores(parts).taken(sorted(range(len(places)), key=places.__getitem__))


def _batches(samples: Sequence[GivenSample]) -> Iterator[tuple[list[int], list[int]]]:
    """Places of samples, whole groups together, and the number of the group of each."""
    groups: dict[Any, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(place)
    rows, numbers = list[int](), list[int]()
    for number, members in enumerate(groups.values()):
        if rows and len(rows) + len(members) > BATCH:
            yield rows, numbers
            rows, numbers = [], []
        rows = rows + members
        numbers = numbers + [number] * len(members)
    yield rows, numbers


def _scored(
    rewards: RewardSet, samples: Sequence[GivenSample], names: Sequence[str], groups: list[int], first: int
) -> RewardBatch:
    made = [sample.made if isinstance(sample.made, str) else load(sample.made) for sample in samples]
    columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
    return rewards.score(made, [sample.prompt for sample in samples], columns, groups, first)  # type: ignore[arg-type]


def _append(out: Path, samples: Sequence[GivenSample], scores: RewardBatch) -> None:
    lines = []
    for row, sample in enumerate(samples):
        record = sample.record()
        for key, found in scores.record(row).items():
            before = record.get(key)
            record[key] = {**(before if isinstance(before, dict) else {}), **found}
        lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    whole = out.stat().st_size if out.exists() else 0
    try:
        with writing(out), out.open("a", encoding="utf-8") as handle:
            handle.write("".join(lines))
    except OSError:
        with suppress(OSError):
            os.truncate(out, whole)  # no line is left half-written
        raise


def _by_kind(samples: Sequence[GivenSample], scores: RewardBatch) -> dict[str, Summary]:
    groups = {group: k for k, group in enumerate(dict.fromkeys(sample.group for sample in samples))}
    found = {}
    for kind in dict.fromkeys(sample.kind for sample in samples):
        rows = [row for row, sample in enumerate(samples) if sample.kind == kind]
        owners = torch.tensor([groups[samples[row].group] for row in rows])
        found[kind] = summaries(Scored(scores.names, owners, scores.values[rows]))
    return found
