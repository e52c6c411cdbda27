"""The run folder: the interface to everything after a run. Every write is to a temporary name, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..rewards.pixels import to_bytes


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary sibling, flush it to disk and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    write(temporary)
    with temporary.open("rb") as handle:
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write)


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
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, path: Path, config: str) -> RunFolder:
        """Make a new run folder.

        Raises:
            ValueError: the folder exists and is not empty, or is a file: a run is never overwritten.
        """
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; name a new folder")
        # A run killed while it wrote its config leaves that file's temporary name, and nothing of anybody's.
        if path.exists() and any(not p.match(".config.yaml.*.tmp") for p in path.iterdir()):
            raise ValueError(f"{path} is not empty; name a new folder, or continue it with `flowgrpo resume {path}`")
        run = cls(path)
        path.mkdir(parents=True, exist_ok=True)
        write_text(run.config, config)  # first: from here on the run can be resumed
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run.

        Raises:
            ValueError: there is no run.
        """
        run = cls(path)
        if not run.config.is_file():
            raise ValueError(f"{path} is not a run folder (no config.yaml); give one that `flowgrpo train` wrote")
        for folder in (run.samples, run.checkpoints):
            if folder.exists() and not folder.is_dir():
                raise ValueError(f"{folder} is a file, and a run has a folder there; move the file away")
        run.samples.mkdir(exist_ok=True)
        run.checkpoints.mkdir(exist_ok=True)
        return run

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to the metrics."""
        _append(self.metrics, [record])

    def rewind(self, iteration: int) -> None:
        """Drop everything that was written at or after `iteration`, so that it can be done again."""
        for file in (self.metrics, self.index):
            if not file.exists():
                continue
            kept = [line for line in _whole_lines(file) if json.loads(line)["iteration"] < iteration]
            write_text(file, "".join(f"{line}\n" for line in kept))

    def save_samples(
        self, phase: str, iteration: int, samples: Tensor | list[str], records: Iterable[Mapping[str, Any]]
    ) -> None:
        """Write images [N, 3, H, W] (of a video [N, F, 3, H, W] its frames side by side) or completions, with a
        record each."""
        self.index_samples(self.write_samples(phase, iteration, samples, records, range(len(samples))))

    def write_samples(
        self,
        phase: str,
        iteration: int,
        samples: Tensor | list[str],
        records: Iterable[Mapping[str, Any]],
        numbers: Sequence[int],
    ) -> list[dict[str, Any]]:
        """Write the images of samples, which are called by their `numbers`; returns their lines for the index."""
        head = {"phase": phase, "iteration": iteration}
        if isinstance(samples, list):
            return [{**head, **record, "completion": text} for text, record in zip(samples, records, strict=True)]
        folder = self.samples / f"iter-{iteration:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for number, image, record in zip(numbers, samples, records, strict=True):
            name = f"{phase}-{number:04d}.png"
            save_image(folder / name, image)
            lines.append({**head, **record, "image": f"{folder.name}/{name}"})
        return lines

    def index_samples(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append to the index of samples."""
        _append(self.index, lines)

    def save_checkpoint(self, iteration: int, write: Callable[[Path], None], keep: int) -> Path:
        """Write a checkpoint folder under a temporary name, rename it, and drop the oldest beyond `keep`."""
        target = self.checkpoints / f"iter-{iteration:06d}"
        temporary = self.checkpoints / f".tmp-{iteration:06d}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
        for old in self.list_checkpoints()[:-keep]:
            shutil.rmtree(old)
        return target

    def list_checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(p for p in self.checkpoints.glob("iter-*") if p.is_dir())


def pixels(image: Tensor) -> NDArray[np.uint8]:
    """[H, W, 3] of an image [3, H, W] in [0, 1]; a video [F, 3, H, W] is its frames side by side."""
    if image.ndim == 4:
        image = torch.cat(list(image), dim=-1)
    array = to_bytes(image).permute(1, 2, 0).numpy()
    return np.ascontiguousarray(array)


def save_image(path: Path, image: Tensor) -> None:
    """Write an image or video as PNG, see `pixels`."""
    temporary = path.with_name(f".{path.name}.tmp")
    Image.fromarray(pixels(image)).save(temporary, format="PNG")
    os.replace(temporary, path)


def _whole_lines(file: Path) -> list[str]:
    """Lines that were written to their end; a crash can cut the last one."""
    lines = []
    for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            json.loads(line)
        except json.JSONDecodeError:
            continue
        lines.append(line)
    return lines


def _append(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    with file.open("a", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
