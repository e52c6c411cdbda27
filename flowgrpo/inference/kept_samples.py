"""A folder that gets samples as they are made, and for an evaluation their rewards when they are scored.

So what was sampled is not lost, where the command is stopped, a reward fails or the disk is full. Each of several
processes keeps its samples. Only the first one writes `index.jsonl`; until the end, the others have files of their own.
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
from ..training.distributed.processes import Processes
from ..training.folder.files import writing
from ..training.folder.rendered_images import Rendered, write_rendered
from ..training.folder.run_folder import sample_fields, save_sample, write_text
from ..training.reporting.records import sample_records
from .model_recipes import check_not_run

ONWARD = "Start the command again, with another --out if it had one: the samples that were made stay in that folder"
"""What to do when one of several processes that sample was killed."""
UNSCORED = RewardBatch(torch.zeros(0, 0), (), torch.zeros(0), {}, {}, {})
"""The scores of samples that are not scored."""
ALONE = Processes()
"""One process, without a launcher."""


class IndexOfAll:
    """`index.jsonl` of a folder, with the lines of all processes. Every process must make one, and join it.

    Args:
        out: the folder.
        processes: which sample together.
    """

    def __init__(self, out: Path, processes: Processes) -> None:
        self.whole, self._processes = out / "index.jsonl", processes
        self._own = self.whole if processes.rank == 0 else out / f"index-process-{processes.rank}.jsonl"
        # No process writes before all have looked at what is in the folder.
        processes.gather(None)
        if processes.rank == 0:
            self._take_in()
        processes.gather(None)

    def _take_in(self) -> None:
        """Bring what other processes of an interrupted command have listed into the index."""
        for left in _of_processes(self.whole.parent):
            self.append([left.read_text(encoding="utf-8")])
            left.unlink()

    def append(self, lines: Sequence[str]) -> None:
        """Add lines for samples of this process."""
        self._own.parent.mkdir(parents=True, exist_ok=True)
        with writing(self._own), self._own.open("a", encoding="utf-8") as handle:
            handle.write("".join(lines))

    def rewrite(self, lines: Mapping[int, str]) -> None:
        """Replace the index by the lines of all processes, in the order of their numbers."""
        parts = self._processes.gather(dict(lines))
        if self._processes.rank == 0:
            everything = {number: line for part in parts for number, line in part.items()}
            write_text(self.whole, "".join(everything[number] for number in sorted(everything)))
        self._done()

    def join(self) -> None:
        """Add the lines of the other processes to the index, after the lines of the first one."""
        if self._processes.count == 1:
            return
        parts = self._processes.gather(self._own.read_text(encoding="utf-8") if self._own.exists() else "")
        if self._processes.rank == 0:
            self.append(parts[1:])
        self._done()

    def _done(self) -> None:
        """Remove the file of this process, once the index has its lines."""
        self._processes.gather(None)
        if self._processes.rank > 0:
            self._own.unlink(missing_ok=True)


class KeptSamples:
    """Writes samples into a new folder: `index.jsonl` in the format of a run, and for images `eval-NNNN.png`.

    Args:
        out: the folder.
        iteration: number of iterations that trained the model.
        phase: what the samples are for, as in the index of a run.
        better: name of a folder in `out` that would do if `out` is a run folder.
        processes: which sample together; every process must make an object.

    Raises:
        ValueError: the folder has samples already, or is a run folder.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        out: Path,
        iteration: int,
        phase: str = "eval",
        better: str = "evaluation",
        processes: Processes = ALONE,
    ) -> None:
        self.index = new_index(out, better)
        self._lines = IndexOfAll(out, processes)
        self._head = {"phase": phase, "iteration": iteration}
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(out))

    def add(self, rows: Sequence[PromptRow], experience: Any, numbers: Sequence[int], seed: int = 0) -> None:
        """Write some samples without rewards.

        Args:
            rows: prompts.
            experience: samples for some of the prompts.
            numbers: the number of each sample among the samples of all processes.
            seed: of the first sample of each prompt.
        """
        records = sample_records(rows, experience, UNSCORED, numbers)
        records = [{**record, "seed": seed + record["seed"]} for record in records]
        lines = []
        for number, record, sample in zip(numbers, records, experience.samples, strict=True):
            if not isinstance(sample, str):
                save_sample(self.index.parent / self._named(number), sample, record.get("sampling_rate"))
            lines.append(self._line(number, record, sample))
        self._lines.append(lines)

    def scored(
        self,
        numbers: Sequence[int],
        records: Sequence[Mapping[str, Any]],
        samples: Sequence[Any],
        rendered: Rendered,
    ) -> None:
        """Replace the index by one with the rewards; every sample was added before. Every process must call it.

        Images that rewards made of completions are written too.

        Args:
            numbers: the number of each sample of this process; the index is in their order.
            records: of the samples.
            samples: images or completions.
            rendered: as in `RewardBatch`.
        """
        made = write_rendered(self.index.parent, "eval", rendered, numbers)
        records = [{**record, **own} for record, own in zip(records, made, strict=True)]
        self._lines.rewrite({n: self._line(n, *one) for n, *one in zip(numbers, records, samples, strict=True)})

    def join(self) -> None:
        """Bring the samples of all processes into the index, without rewards. Every process must call it."""
        self._lines.join()

    def _named(self, number: int) -> str:
        return f"eval-{number:04d}.png"

    def _line(self, number: int, record: Mapping[str, Any], sample: Any) -> str:
        shown = {"completion": sample} if isinstance(sample, str) else sample_fields(self._named(number), sample)
        return json.dumps({**self._head, **record, **shown}, allow_nan=False) + "\n"


class SampledImages:
    """The `index.jsonl` of a folder of sampled images: a line for each image, with its prompt.

    Several commands may sample into one folder, so the file may be there already. If one of them was interrupted, what
    its other processes have listed is brought into the index.

    Args:
        out: the folder, which may not exist yet.
        iteration: number of iterations that trained the model.
        processes: which sample together; every process must make an object.

    Raises:
        ValueError: the file lists something else.
    """

    def __init__(self, out: Path, iteration: int, processes: Processes = ALONE) -> None:
        self.iteration = iteration
        for index in (out / "index.jsonl", *_of_processes(out)):
            if index.is_file() and not _lists_samples(index):
                raise ValueError(f"{index} lists samples that `sample` has not written; name another folder with --out")
        self._lines = IndexOfAll(out, processes)

    def add(
        self,
        path: Path,
        image: Tensor,
        prompt: str,
        seed: int,
        noise: int,
        columns: Mapping[str, Any],
        rate: int | None = None,
    ) -> None:
        """List an image that is written.

        Args:
            path: its file, in the folder.
            image: [3, H, W], or a video [F, 3, H, W].
            prompt: its prompt.
            seed: its seed, as on the command line.
            noise: seed of the generator of its initial noise.
            columns: further columns of the prompt file.
            rate: of a sound [C, S], samples a second.
        """
        line = {
            "phase": PHASE, "iteration": self.iteration, "prompt": prompt, "seed": seed, "noise": noise,
            "columns": dict(columns), **({} if rate is None else {"sampling_rate": rate}),
            **sample_fields(path.name, image),
        }  # fmt: skip
        self._lines.append([json.dumps(line, allow_nan=False) + "\n"])

    def join(self) -> None:
        """Bring the images of all processes into the index. Every process must call it."""
        self._lines.join()


def _of_processes(out: Path) -> list[Path]:
    """The files in which processes list their samples until the end of a command, but the first process's."""
    return sorted(out.glob("index-process-*.jsonl"))


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


def new_index(out: Path, better: str) -> Path:
    """Path of the file that lists samples in a folder.

    Args:
        out: the folder.
        better: name of a folder in `out` that would do if `out` is a run folder.

    Raises:
        ValueError: the file exists, the folder has the pictures of an evaluation, or it is a run folder.
    """
    index = out / "index.jsonl"
    for taken in (index, *sorted(out.glob("eval-*.png")), *_of_processes(out)):
        if taken.exists():
            raise ValueError(f"{taken} exists; name another folder with --out")
    check_not_run(out, better)
    return index
