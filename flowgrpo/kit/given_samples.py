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

from ..inference.evaluation import progress, summaries
from ..inference.image_samples import silent
from ..rewards.base import SAMPLING_RATE, RewardSpec
from ..rewards.runner import RewardBatch, RewardSet
from ..rewards.score_batches import join_scores
from ..training.data import PromptRow, read_prompts
from ..training.evaluating import Scored
from ..training.folder.files import writing
from .folder import (
    AS_STRIP,
    ENDINGS,
    METADATA,
    VIDEOS,
    LabelledPicture,
    file_key,
    hidden,
    inner_columns,
    listed_picture,
    load,
    prompt_of,
    read_folder,
)
from .sound_files import ENDING, LabelledSound, sound_of

BATCH = 64
"""About how many samples are scored at once; a group is not divided."""

Summary = dict[str, tuple[float, float, int]]
"""Reward -> mean, its standard error over prompts, and the number of samples to which the reward applies."""


SOUND = "sound"
"""The column of a list that names a WAV file."""
WORDS = {str: "completions", LabelledPicture: "pictures", LabelledSound: "sounds"}


@dataclass(frozen=True)
class GivenSample:
    """A sample that exists already.

    Attributes:
        prompt: its prompt.
        columns: further columns, for rewards.
        made: a completion, or a picture or sound that is still to be loaded.
        line: what the list of samples says about it; empty for a picture without a list.
        folder: the folder of the list, to which the paths in `line` are relative.
    """

    prompt: str
    columns: dict[str, Any]
    made: str | LabelledPicture | LabelledSound
    line: dict[str, Any]
    folder: Path = Path()

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
        """The completion, or the path of the picture or sound."""
        if isinstance(self.made, str):
            return {"completion": self.made}
        return {"sound" if isinstance(self.made, LabelledSound) else "image": str(self.made.path)}

    def record(self, folder: Path) -> dict[str, Any]:
        """The sample for a list in this folder, in which the reward's scores are added."""
        if not isinstance(self.made, str) and not self.line:
            ((key, _),) = self.shown().items()
            return {"prompt": self.prompt, key: _relative(self.made.path, folder), "columns": self.columns}
        if self.folder.resolve() == folder.resolve():
            return dict(self.line)
        file = None if isinstance(self.made, str) else file_key(self.line)
        moved: dict[str, Any] = {} if file is None else {file: self._moved(self.line[file], folder)}
        if SOUND in self.line and isinstance(self.made, LabelledSound):
            moved[SOUND] = self._moved(str(self.line[SOUND]), folder)
        if self.kind and isinstance(pictures := self.line.get("pictures"), list):
            moved["pictures"] = [self._moved(str(path), folder) for path in pictures]
        return {**self.line, **moved}

    def _moved(self, path: str, folder: Path) -> str:
        return path if Path(path).is_absolute() else _relative(self.folder / path, folder)


def _relative(path: Path, folder: Path) -> str:
    # `..` leads out of where a link points to, so links are followed; a link that is the file itself keeps its name.
    whole = path.parent.resolve() / path.name
    try:
        return Path(os.path.relpath(whole, folder.resolve())).as_posix()
    except ValueError:  # on another drive of Windows
        return whole.as_posix()


def given_samples(source: Path, metadata: Path | None = None) -> list[GivenSample]:
    """The samples of a run, of a folder that `sample` or `evaluate --out` wrote, or of a folder or list from elsewhere.

    Args:
        source: a run folder; a folder of pictures; a folder with a list (`index.jsonl`, `metadata.jsonl` or
            `metadata.csv`); or the list itself: a prompt file with a column `completion`, or with the path of a
            picture or of a WAV file, relative to the list, in `file_name`, `file`, `image` or `path`. For a video, the
            column `frames` has the number of frames that stand side by side in the picture. A WAV file may also be
            named in the column `sound`.
        metadata: the list of a folder of pictures, if it is elsewhere or has another name.

    Raises:
        ValueError: there is nothing to score, or a list names no sample in one of its rows.
    """
    if not source.exists():
        raise ValueError(
            f"there is no {source}; give a run folder, a folder of pictures, or a list of samples such as answers.jsonl"
        )
    if (source / "samples" / "index.jsonl").is_file():
        source = source / "samples"
    if source.is_file() and source.suffix.lower() in VIDEOS:
        raise ValueError(f"{source} is a video; {AS_STRIP}")
    if source.is_file() and source.suffix.lower() in ENDINGS:
        raise ValueError(f"{source} is one picture; name its folder, or a list with a column `file_name`")
    if source.is_dir() and metadata is None:
        metadata = next((source / name for name in METADATA if (source / name).is_file()), None)
    listed = metadata or (source if source.is_file() else None)
    if listed is None:
        sounds = sorted(path for path in source.rglob(f"*{ENDING}") if not hidden(path.relative_to(source)))
        if sounds and not any(source.rglob("*.png")):
            heard = [sound_of(path, prompt_of(path), {}) for path in sounds]
            return [GivenSample(one.prompt, dict(one.columns), one, {}) for one in heard]
        return [GivenSample(one.prompt, one.columns, one, {}) for one in read_folder(source)]
    found = [_given(listed, row) for row in read_prompts(str(listed))]
    kinds = [WORDS[kind] for kind in dict.fromkeys(type(one.made) for one in found)]
    if len(kinds) > 1:
        raise ValueError(f"{listed} has {' and '.join(kinds)}; put them into lists of their own")
    return found


def _given(listed: Path, row: PromptRow) -> GivenSample:
    text, line = row.columns.get("completion"), {"prompt": row.text, **row.columns}
    if isinstance(text, str):
        return GivenSample(row.text, inner_columns(row, "completion"), text, line, listed.parent)
    key = SOUND if isinstance(row.columns.get(SOUND), str) else file_key(row.columns)
    if key is not None and row.columns[key].lower().endswith(ENDING):
        try:
            sound = sound_of(listed.parent / row.columns[key], row.text, inner_columns(row, key))
        except ValueError as error:
            raise ValueError(f"{row.place or listed}: {error}") from None
        return GivenSample(row.text, dict(sound.columns), sound, line, listed.parent)
    if file_key(row.columns) is None:
        raise ValueError(
            f"{listed}: prompt {row.id + 1} has neither a text in a column `completion` nor a picture in a column "
            f"`file_name` (it has {', '.join(['prompt', *row.columns])})"
        )
    picture = listed_picture(listed, row)
    return GivenSample(row.text, picture.columns, picture, line, listed.parent)


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
        samples: all of them pictures and videos, or all of them sounds, or all of them completions.
        out: file that gets a line for each sample as soon as it is scored: the line of its list, with the scores in
            `rewards`, `sub_scores`, `notes` and `parts`, beside scores of other rewards that are there already. Its
            paths are relative to this file.
        say: called with lines that say how much is done, also when an error or an interruption ends it.

    Raises:
        ValueError: a reward cannot be made, does not take these samples, or needs a column that they lack; a picture
            cannot be read; or the name of a file cannot stand in `out`.
        RewardError: a reward failed; what was scored before is in `out`.
    """
    if out is not None:
        _check_names(samples, out.parent)
    rewards = RewardSet(specs)
    names = list(dict.fromkeys(name for sample in samples for name in sample.columns))
    what = {str: "completions", LabelledSound: "sounds"}.get(type(samples[0].made), "images")
    added = [SAMPLING_RATE] if what == "sounds" else []
    for reward in rewards.rewards:
        reward.check(what, [*names, *added], grouped=True)
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
    finally:
        if out is not None and 0 < done < len(samples):
            say(f"{done} of {len(samples)} samples are scored in {out}")
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
    made = [_loaded(sample.made) for sample in samples]
    columns: dict[str, list[Any]] = {name: [one.columns.get(name) for one in samples] for name in names}
    rates = [sample.made.rate for sample in samples if isinstance(sample.made, LabelledSound)]
    if rates:
        columns[SAMPLING_RATE] = rates
    return rewards.score(made, [sample.prompt for sample in samples], columns, groups, first)  # type: ignore[arg-type]


def _loaded(made: str | LabelledPicture | LabelledSound) -> str | torch.Tensor:
    if isinstance(made, str):
        return made
    return made.load() if isinstance(made, LabelledSound) else load(made)


def _check_names(samples: Sequence[GivenSample], folder: Path) -> None:
    for sample in samples:
        try:
            json.dumps(sample.record(folder), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            what = next(iter(sample.shown().values()))
            raise ValueError(
                f"{what!r:.200} is not UTF-8, so the list of scores cannot hold it; give the file another name"
                if not isinstance(sample.made, str)
                else f"the line of the completion {what!r:.80} is not UTF-8, so the list of scores cannot hold it"
            ) from None


def _append(out: Path, samples: Sequence[GivenSample], scores: RewardBatch) -> None:
    lines = []
    for row, sample in enumerate(samples):
        record = sample.record(out.parent)
        for key, found in scores.record(row).items():
            before = record.get(key)
            record[key] = {**(before if isinstance(before, dict) else {}), **found}
        lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    whole = out.stat().st_size if out.exists() else 0
    try:
        with writing(out), out.open("a", encoding="utf-8") as handle:
            handle.write("".join(lines))
    except BaseException:
        with suppress(OSError):
            os.truncate(out, whole)  # no line is left half-written
            if not whole:
                out.unlink()  # an empty file would be in the way when there is room again
        raise


def _by_kind(samples: Sequence[GivenSample], scores: RewardBatch) -> dict[str, Summary]:
    groups = {group: k for k, group in enumerate(dict.fromkeys(sample.group for sample in samples))}
    found = {}
    for kind in dict.fromkeys(sample.kind for sample in samples):
        rows = [row for row, sample in enumerate(samples) if sample.kind == kind]
        owners = torch.tensor([groups[samples[row].group] for row in rows])
        found[kind] = summaries(Scored(scores.names, owners, scores.values[rows]))
    return found
