"""The run folder: everything that later commands read. A file is written under a temporary name and then renamed."""

from __future__ import annotations

import os
import re
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ...configs.trust import remember_run
from ...intake.json_text import lines_of, parse_json
from ...intake.links import check_links
from ...intake.run_folders import no_run
from ...media.sound import spectrogram, write_sound
from ...rewards.pixels import to_bytes
from ..joined_rollouts import Samples
from .files import append_lines, sync, sync_folder, write_atomically, write_text, writing
from .leftovers import DAMAGED, DROPPED, REPLACED, UNFINISHED, clear, remove
from .lock import NAME, claim, release
from .prompt_pictures import PromptPictures
from .run_log import NAME as LOG

__all__ = ["RunFolder", "pixels", "save_image", "save_sample", "write_atomically", "write_text"]

TRACKED = ("trackers.json", "flowgrpo", "wandb", ".aim")
"""What trackers write into a run folder."""
_ITERATION = re.compile(r"iter-(\d+)")


def refuse_part_of_run(path: Path) -> None:
    """Raise ValueError for a checkpoint of a run, or a former recipe of it, which look like a run of their own."""
    path = path.resolve()
    run, room = path.parent.parent, path.parent.name
    if room not in ("checkpoints", "recipes") or not (run / "config.yaml").is_file():
        return
    found = _ITERATION.fullmatch(path.name)
    number = f"; a checkpoint is chosen with --checkpoint {int(found[1])}" if found and room == "checkpoints" else ""
    raise ValueError(f"{path} is a part of the run {run}; give the folder of the run{number}")


class RunFolder:
    """`config.yaml`, `metrics.jsonl`, `samples/`, `checkpoints/`, `gallery/`, and the results.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples"
        self.index = self.samples / "index.jsonl"
        self.prompt_pictures = PromptPictures(self.samples)
        self.checkpoints = path / "checkpoints"
        self.trackers = path / TRACKED[0]
        self.notes: list[str] = []
        """Sentences that a person must read before the run goes on."""
        self._saved: Counter[int] | None = None
        self._claim: weakref.finalize[..., RunFolder] | None = None
        self._made = False

    @classmethod
    def create(cls, path: Path, config: str) -> RunFolder:
        """Make a new run folder; this process becomes its only writer, and this machine trusts what the recipe names.

        Raises:
            ValueError: the folder exists and is not empty, the path is a file, or another process makes a run in the
                folder. A run is never overwritten.
        """
        check_links(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; name a new folder")
        # A run that was killed before it wrote its config leaves only its lock or a temporary file.
        ours = (NAME, ".config.yaml.*.tmp")
        if path.exists() and any(not any(p.match(name) for name in ours) for p in path.iterdir()):
            raise ValueError(f"{path} is not empty; name a new folder, or continue it with `flowgrpo resume {path}`")
        run = cls(path)
        run._made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        run.claim()
        # Another process may have made a run and ended since the check above.
        if run.config.exists():
            raise ValueError(
                f"{path} holds a run by now; name a new folder, or continue it with `flowgrpo resume {path}`"
            )
        unremembered = remember_run(path, config)
        run.notes += [] if unremembered is None else [unremembered]
        write_text(run.config, config)  # first: from here on the run can be resumed
        run._complete()
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run.

        Raises:
            ValueError: the folder holds no run, is a part of one, or has links that lead out of it.
        """
        run = cls(path)
        refuse_part_of_run(path)
        check_links(path)
        if not run.config.is_file():
            raise ValueError(no_run(path))
        run._complete()
        return run

    def _complete(self) -> None:
        for folder in (self.samples, self.checkpoints):
            if folder.exists() and not folder.is_dir():
                raise ValueError(f"{folder} is a file, and a run has a folder there; move the file away")
        self.samples.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)

    def claim(self) -> None:
        """Become the only writer until `release` or the end of this object, and remove leftovers of killed processes.

        Raises:
            ValueError: another process writes in the folder.
        """
        if self._claim is not None and self._claim.alive:
            return
        note = claim(self.path)
        self._claim = weakref.finalize(self, release, self.path.resolve())
        if note is not None:
            self.notes.append(note)
        clear(self.path)

    def release(self) -> None:
        """Let another process write in the folder."""
        if self._claim is not None:
            self._claim()

    def abandon(self) -> None:
        """Remove what a run has written that could not begin, so that the same folder may be named again.

        A folder with anything else in it stays as it is.
        """
        folders, files = (self.samples, self.checkpoints), (self.config, self.path / LOG, self.path / NAME)
        tracked = {self.path / name for name in TRACKED}
        # An error here must not hide the error that ended the run.
        with suppress(OSError):
            if set(self.path.iterdir()) - {*folders, *files, *tracked} or any(
                any(folder.iterdir()) for folder in folders if folder.is_dir()
            ):
                return
            self.release()
            for path in tracked:
                remove(path)
            # Another process of the run may be removing the same things.
            for file in files:
                file.unlink(missing_ok=True)
            for folder in (*folders, *([self.path] if self._made else [])):
                with suppress(FileNotFoundError):
                    folder.rmdir()

    @property
    def begun(self) -> bool:
        """Whether the run may have done an iteration; if not, it begins with iteration 0."""
        return self.metrics.exists() or any(self.checkpoints.iterdir())

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to the metrics."""
        append_lines(self.metrics, [record])

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of the metrics that can be read, oldest first."""
        return [record for _, record in read_lines(self.metrics)[0]] if self.metrics.exists() else []

    def read_index(self) -> list[dict[str, Any]]:
        """The lines of the index of samples that can be read, oldest first."""
        return [record for _, record in read_lines(self.index)[0]] if self.index.exists() else []

    def count_samples(self, iteration: int) -> int:
        """Number of samples in the index that are from before an iteration."""
        if self._saved is None:
            self._saved = Counter(record["iteration"] for record in self.read_index())
        return sum(number for made, number in self._saved.items() if made < iteration)

    def rewind(self, iteration: int) -> None:
        """Drop everything that was written at or after `iteration`, so that these iterations can be done again.

        A line that a crash cut short is dropped too. If other lines cannot be read, a copy of the file is kept.
        """
        for file in (self.metrics, self.index):
            if not file.exists():
                continue
            records, broken = read_lines(file)
            if broken:
                copy = unused(file.with_name(f"{DAMAGED}{file.name}"))
                shutil.copyfile(file, copy)
                where = ", ".join(str(number) for number in broken[:5]) + (", …" if len(broken) > 5 else "")
                self.notes.append(
                    f"{file}: cannot read line {where}, which no run writes; such lines are left out, and {copy.name} "
                    "keeps the file as it was"
                )
            kept = [line for line, record in records if record["iteration"] < iteration]
            write_text(file, "".join(f"{line}\n" for line in kept))
        self._saved = None

    def save_samples(
        self, phase: str, iteration: int, samples: Tensor | list[str], records: Iterable[Mapping[str, Any]]
    ) -> None:
        """Write samples and index them, with a record for each sample.

        Samples are images [N, 3, H, W], videos [N, F, 3, H, W], sounds [N, C, S] or completions. See `save_sample`.
        """
        self.index_samples(self.write_samples(phase, iteration, samples, records, range(len(samples))))

    def write_samples(
        self,
        phase: str,
        iteration: int,
        samples: Samples,
        records: Iterable[Mapping[str, Any]],
        numbers: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Write the images of samples; returns their lines for the index. `numbers` are part of the file names."""
        head = {"phase": phase, "iteration": iteration}
        texts = [sample for sample in samples if isinstance(sample, str)]
        if texts:
            return [{**head, **record, "completion": text} for text, record in zip(texts, records, strict=True)]
        folder = self.iteration_folder(iteration)
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for number, image, record in zip(numbers, samples, records, strict=True):
            name = f"{phase}-{number:04d}.png"
            save_sample(folder / name, image, record.get("sampling_rate"))
            lines.append({**head, **record, **sample_fields(f"{folder.name}/{name}", image)})
        return lines

    def iteration_folder(self, iteration: int) -> Path:
        """The folder of the images of an iteration; it may not exist."""
        return self.samples / f"iter-{iteration:06d}"

    def index_samples(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines to the index of samples."""
        new = list(lines)
        append_lines(self.index, new)
        if self._saved is not None:
            self._saved.update(line["iteration"] for line in new)

    def save_checkpoint(self, iteration: int, write: Callable[[Path], None], keep: int) -> Path:
        """Write a checkpoint folder under a temporary name, rename it, and drop the oldest beyond `keep`.

        At every moment a whole checkpoint exists. If a kill leaves it under another name, `claim` renames it back.
        """
        target = self.checkpoint(iteration)
        temporary, old = (self.checkpoints / f"{kind}{iteration:06d}" for kind in (UNFINISHED, REPLACED))
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with writing(temporary):
                temporary.mkdir(parents=True)
                write(temporary)
                for file in (path for path in temporary.rglob("*") if path.is_file()):
                    sync(file)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(temporary)
        if target.exists():
            os.replace(target, old)
        os.replace(temporary, target)
        sync_folder(self.checkpoints)
        shutil.rmtree(old, ignore_errors=True)
        for stale in self.list_checkpoints()[:-keep]:
            # A half-removed folder must not look like a checkpoint.
            dropped = self.checkpoints / f"{DROPPED}{stale.name}"
            os.replace(stale, dropped)
            shutil.rmtree(dropped, ignore_errors=True)
        return target

    def checkpoint(self, iteration: int) -> Path:
        """The folder of the checkpoint before an iteration; it may not exist."""
        return self.checkpoints / f"iter-{iteration:06d}"

    def list_checkpoints(self) -> list[Path]:
        """Checkpoints under their final names, oldest first."""
        found = ((_ITERATION.fullmatch(path.name), path) for path in self.checkpoints.glob("iter-*") if path.is_dir())
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]

    def set_aside(self, checkpoint: Path) -> Path:
        """Rename a damaged checkpoint, so that it no longer looks like a checkpoint; returns its new path."""
        target = unused(self.checkpoints / f"{DAMAGED}{checkpoint.name}")
        os.replace(checkpoint, target)
        return target


def read_lines(file: Path) -> tuple[list[tuple[str, dict[str, Any]]], list[int]]:
    """Readable lines of metrics or index with their records, and the numbers of unreadable lines, from 1.

    Text after the last line end is left out, because a crash cut the line short.
    """
    records, broken = [], []
    for number, line in enumerate(lines_of(file), start=1):
        if line and not line.endswith("\n"):
            break
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("iteration"), int):
            records.append((line.removesuffix("\n"), record))
        else:
            broken.append(number)
    return records, broken


def unused(path: Path) -> Path:
    """This path, or if it exists, the path with a number."""
    names = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(name for name in names if not name.exists())


def pixels(image: Tensor, rate: int | None = None) -> NDArray[np.uint8]:
    """[H, W, 3] bytes of an image [3, H, W] in [0, 1]; the frames of a video [F, 3, H, W] are side by side.

    Of a sound [C, S] with a sampling rate, a picture of its spectrum.
    """
    if rate is not None:
        return np.asarray(spectrogram(image.float().numpy(), rate))
    if image.ndim == 4:
        image = torch.cat(list(image), dim=-1)
    array = to_bytes(image).permute(1, 2, 0).numpy()
    return np.ascontiguousarray(array)


def sample_fields(image: str, sample: Tensor) -> dict[str, Any]:
    """The fields of the index that name the files of `save_sample`; a record of a sound has its `sampling_rate` too.

    Args:
        image: the path of the PNG file.
        sample: an image [3, H, W], a video [F, 3, H, W] or a sound [C, S].
    """
    if sample.ndim == 2:
        return {"image": image, "sound": image.removesuffix(".png") + ".wav"}
    return {"image": image, **({"frames": len(sample)} if sample.ndim == 4 else {})}


def save_sample(path: Path, sample: Tensor, rate: int | None = None) -> None:
    """Write an image, or the frames of a video side by side, as PNG.

    Of a sound [C, S] with a sampling rate, the picture shows the spectrum, and a WAV file beside it is the sound.
    """
    save_image(path, sample, rate)
    if rate is not None:
        file = path.with_suffix(".wav")
        with writing(file):
            write_sound(file, sample.float().numpy(), rate)


def save_image(path: Path, image: Tensor, rate: int | None = None) -> None:
    """Write an image or video as PNG, see `pixels`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with writing(path):
            Image.fromarray(pixels(image, rate)).save(temporary, format="PNG")
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
