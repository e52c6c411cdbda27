"""The samples to score, with their prompts, columns and groups, checked once; and the samples kept after a failure."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..media.sound import write_sound
from .base import RESERVED, SAMPLING_RATE, kind_of, within_range
from .pixels import to_bytes


@dataclass(frozen=True)
class Inputs:
    """B samples with all that is known about them.

    Attributes:
        samples: images [B, 3, H, W] or videos [B, F, 3, H, W] in [0, 1], sounds [B, C, S] in [-1, 1], or B strings.
        prompts: B prompts.
        columns: name -> B values.
        groups: B group ids; None if unknown.
        first: number of the first sample. Earlier samples of the rollout may have been scored before.
        rows: the number of each sample after `first`; None if the samples are numbered one after the other.
    """

    samples: Tensor | list[str]
    prompts: list[str]
    columns: dict[str, list[Any]]
    groups: list[int] | None
    first: int = 0
    rows: tuple[int, ...] | None = None

    def number(self, row: int) -> int:
        """The number of a sample in messages."""
        return self.first + (row if self.rows is None else self.rows[row])

    def take(self, rows: list[int]) -> tuple[Any, list[str], dict[str, list[Any]], list[int] | None]:
        if isinstance(self.samples, Tensor):
            chosen = self.samples if rows == list(range(len(self.samples))) else self.samples[rows]
            # Clamping copies, so a reward that writes into its images cannot change the images of other rewards.
            # Decoders may leave other strides, which a reward that takes a view would stumble over.
            samples: Any = within_range(chosen.float()).contiguous()
        else:
            samples = [self.samples[i] for i in rows]
        # A reward that changes a list of its columns cannot change it for other samples and rewards.
        columns = {
            name: [deepcopy(column[i]) if isinstance(column[i], list | dict) else column[i] for i in rows]
            for name, column in self.columns.items()
        }
        groups = None if self.groups is None else [self.groups[i] for i in rows]
        return samples, [self.prompts[i] for i in rows], columns, groups


def check_inputs(
    samples: Tensor | Sequence[str],
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    groups: Tensor | Sequence[int] | None,
) -> Inputs:
    """Check that samples, prompts, columns and groups fit each other; see `RewardSet.score`.

    Raises:
        ValueError: they do not fit, or the images are not floats in [0, 1].
    """
    count = len(samples)
    if isinstance(samples, Tensor) and kind_of(samples) == "sounds":
        if not samples.is_floating_point() or not bool(samples.isfinite().all()) or 0 in samples.shape[1:]:
            raise ValueError(
                f"sounds are {samples.dtype} of shape {list(samples.shape)}; give finite floats [B, C, S], C channels "
                "of S samples, in [-1, 1]"
            )
        rates = columns.get(SAMPLING_RATE)
        if rates is None or len({*rates}) > 1:
            raise ValueError(f"sounds need a column `{SAMPLING_RATE}`, with the same samples a second in each row")
        checked: Tensor | list[str] = samples.detach()
    elif isinstance(samples, Tensor):
        if samples.ndim not in (4, 5) or samples.shape[-3] != 3 or not samples.is_floating_point():
            raise ValueError(
                f"images are {samples.dtype} of shape {list(samples.shape)}; give floats [B, 3, H, W] "
                "in [0, 1], or videos [B, F, 3, H, W]"
            )
        # This form of the comparison also refuses NaN. The margin is one step of bfloat16 near 1.
        if count and not (samples.min() >= -0.01 and samples.max() <= 1.01):
            low, high = samples.min().item(), samples.max().item()
            raise ValueError(f"images range from {low:.3g} to {high:.3g}; rewards take [0, 1]")
        checked = samples.detach()
    elif isinstance(samples, str) or not all(isinstance(sample, str) for sample in samples):
        raise ValueError(
            "samples must be an image tensor [B, 3, H, W], a tensor of sounds [B, C, S] or a list of B strings"
        )
    else:
        checked = list(samples)
    ids = None if groups is None else [int(group) for group in groups]
    lengths = {"prompts": prompts, **({} if ids is None else {"groups": ids})}
    for name, values in {**{f"column {key!r}": column for key, column in columns.items()}, **lengths}.items():
        if isinstance(values, str) or len(values) != count:
            raise ValueError(f"{name} has {len(values)} entries for {count} samples; give one for each")
    reserved = sorted(set(columns) & set(RESERVED))
    if reserved:
        raise ValueError(f"the prompts have a column {reserved[0]!r}, which rewards receive anyway; rename it")
    return Inputs(checked, list(prompts), {name: list(column) for name, column in columns.items()}, ids)


def keep(folder: Path, name: str, inputs: Inputs, rows: list[int], error: Exception) -> Path:
    """Write samples with their prompts into a new sub-folder, which appears only when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "_", name).strip(".") or "reward"
    # Two rewards may fail at the same time, in threads.
    partial = folder / f".{stem}-{os.getpid()}-{threading.get_ident()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    samples, prompts, columns, groups = inputs.take(rows)
    for i, row in enumerate(rows):
        number = inputs.number(row)
        facts: dict[str, Any] = {"reward": name, "error": f"{type(error).__name__}: {error}", "index": number}
        facts.update(prompt=prompts[i], columns={key: column[i] for key, column in columns.items()})
        if groups is not None:
            facts["group"] = groups[i]
        if isinstance(samples, Tensor) and kind_of(samples) == "sounds":
            write_sound(partial / f"sample-{number:04d}.wav", samples[i], int(columns[SAMPLING_RATE][i]))
        elif isinstance(samples, Tensor):
            _save_images(samples[i], partial / f"sample-{number:04d}")
        else:
            facts["completion"] = samples[i]
        text = json.dumps(facts, indent=2, ensure_ascii=False, default=repr)
        (partial / f"sample-{number:04d}.json").write_text(text + "\n", encoding="utf-8")
    place = 0
    while True:
        target = folder / f"{stem}-{place:04d}"
        if not target.exists():
            try:
                return partial.rename(target)
            except OSError:
                # Another process may have taken the name in the meantime.
                if not target.exists():
                    raise
        place += 1


def _save_images(image: Tensor, path: Path) -> None:
    from PIL import Image

    frames = image if image.ndim == 4 else image.unsqueeze(0)
    pixels = to_bytes(frames).movedim(1, -1).cpu().numpy()
    for number, frame in enumerate(pixels):
        suffix = f"-frame-{number:03d}" if len(pixels) > 1 else ""
        Image.fromarray(frame).save(path.with_name(f"{path.name}{suffix}.png"))
