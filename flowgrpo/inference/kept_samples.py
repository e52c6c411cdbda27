"""A folder that gets samples as they are made, and for an evaluation their rewards when they are scored.

So what was sampled is not lost, where the command is stopped, a reward fails or the disk is full.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..rewards.runner import RewardBatch
from ..training.data import PromptRow
from ..training.folder.files import writing
from ..training.folder.run_folder import save_image, write_text
from ..training.reporting.records import sample_records
from .opening import check_not_run

UNSCORED = RewardBatch(torch.zeros(0, 0), (), torch.zeros(0), {}, {}, {})
"""The scores of samples that are not scored."""


class KeptSamples:
    """Writes samples into a new folder: `index.jsonl` in the format of a run, and for images `eval-NNNN.png`.

    Args:
        out: the folder.
        iteration: number of iterations that trained the model.
        phase: what the samples are for, as in the index of a run.
        better: name of a folder in `out` that would do if `out` is a run folder.

    Raises:
        ValueError: the folder has samples already, or is a run folder.
        OSError: the folder cannot be written.
    """

    def __init__(self, out: Path, iteration: int, phase: str = "eval", better: str = "evaluation") -> None:
        self.index = new_index(out, better)
        self._head = {"phase": phase, "iteration": iteration}
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(out))

    def add(self, rows: Sequence[PromptRow], experience: Any, numbers: Sequence[int], seed: int = 0) -> None:
        """Write some samples without rewards.

        Args:
            rows: prompts.
            experience: samples for some of the prompts.
            numbers: the number of each sample among all samples.
            seed: of the first sample of each prompt.
        """
        records = sample_records(rows, experience, UNSCORED, numbers)
        records = [{**record, "seed": seed + record["seed"]} for record in records]
        lines = []
        for number, record, sample in zip(numbers, records, experience.samples, strict=True):
            if not isinstance(sample, str):
                save_image(self.index.parent / self._named(number), sample)
            lines.append(self._line(number, record, sample))
        with writing(self.index), self.index.open("a", encoding="utf-8") as handle:
            handle.write("".join(lines))

    def scored(self, numbers: Sequence[int], records: Sequence[Mapping[str, Any]], samples: Sequence[Any]) -> None:
        """Replace the index by one with the rewards; every sample was added before.

        Args:
            numbers: the number of each sample; the index is in their order.
            records: of the samples.
            samples: images or completions.
        """
        lines = {n: self._line(n, *one) for n, *one in zip(numbers, records, samples, strict=True)}
        write_text(self.index, "".join(lines[number] for number in sorted(lines)))

    def _named(self, number: int) -> str:
        return f"eval-{number:04d}.png"

    def _line(self, number: int, record: Mapping[str, Any], sample: Any) -> str:
        shown = {"completion": sample} if isinstance(sample, str) else picture_fields(self._named(number), sample)
        return json.dumps({**self._head, **record, **shown}, allow_nan=False) + "\n"


class SampledImages:
    """The `index.jsonl` of a folder of sampled images: a line for each image, with its prompt.

    Several commands may sample into one folder, so the file may be there already.

    Args:
        out: the folder, which may not exist yet.
        iteration: number of iterations that trained the model.

    Raises:
        ValueError: the file lists something else.
    """

    def __init__(self, out: Path, iteration: int) -> None:
        self.index, self.iteration = out / "index.jsonl", iteration
        if self.index.is_file() and not _lists_samples(self.index):
            raise ValueError(
                f"{self.index} lists samples that `sample` has not written; name another folder with --out"
            )

    def add(self, path: Path, image: Tensor, prompt: str, seed: int, noise: int, columns: Mapping[str, Any]) -> None:
        """List an image that is written.

        Args:
            path: its file, in the folder.
            image: [3, H, W], or a video [F, 3, H, W].
            prompt: its prompt.
            seed: its seed, as on the command line.
            noise: seed of the generator of its initial noise.
            columns: further columns of the prompt file.
        """
        line = {
            "phase": PHASE, "iteration": self.iteration, "prompt": prompt, "seed": seed, "noise": noise,
            "columns": dict(columns), **picture_fields(path.name, image),
        }  # fmt: skip
        with writing(self.index), self.index.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(line, allow_nan=False) + "\n")


def _lists_samples(index: Path) -> bool:
    with index.open(encoding="utf-8") as lines:
        first = lines.readline()
    try:
        line = json.loads(first or "{}")
    except ValueError:
        return False
    return not first or (isinstance(line, dict) and line.get("phase") == PHASE)


PHASE = "sample"
"""What the index says of samples that no evaluation made."""


def picture_fields(name: str, image: Tensor) -> dict[str, Any]:
    """The fields that name a picture, or a video whose frames stand side by side in the file."""
    return {"image": name, **({"frames": len(image)} if image.ndim == 4 else {})}


def new_index(out: Path, better: str) -> Path:
    """Path of the file that lists samples in a folder.

    Args:
        out: the folder.
        better: name of a folder in `out` that would do if `out` is a run folder.

    Raises:
        ValueError: the file exists, the folder has the pictures of an evaluation, or it is a run folder.
    """
    index = out / "index.jsonl"
    for taken in (index, *sorted(out.glob("eval-*.png"))):
        if taken.exists():
            raise ValueError(f"{taken} exists; name another folder with --out")
    check_not_run(out, better)
    return index
