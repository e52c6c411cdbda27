"""What trackers get of the samples of a run: images with captions, and completions as a table or as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..folder.run_folder import pixels
from ..joined_rollouts import Samples

SHOWN = 16
"""Number of samples that trackers get at a time. The run folder has all samples."""
NUMBERS_ONLY = frozenset({"aim", "dvclive", "mlflow", "swanlab"})
"""Trackers whose `log` takes no text: accelerate warns of the text, or the tracker raises an error."""


@dataclass(frozen=True)
class TrackedSamples:
    """Some samples of one iteration.

    Attributes:
        tag: their name for trackers.
        iteration: iterations done before.
        records: one for each sample, for its prompt and its rewards.
        completions: of a language model; empty for images.
        images: [H, W, 3] bytes, in several sizes; of sounds, their spectra; empty for completions.
    """

    tag: str
    iteration: int
    records: Sequence[Mapping[str, Any]]
    completions: Sequence[str] = ()
    images: Sequence[np.ndarray] = ()


def shown_samples(phase: str, iteration: int, samples: Samples, records: Sequence[Mapping[str, Any]]) -> TrackedSamples:
    """Choose some samples. They are spread evenly, so that they do not all belong to the first prompts."""
    count = len(records)
    chosen = sorted({k * count // min(count, SHOWN) for k in range(min(count, SHOWN))})
    some = [samples[k] for k in chosen]
    return TrackedSamples(
        f"samples/{phase}",
        iteration,
        [records[k] for k in chosen],
        [sample for sample in some if isinstance(sample, str)],
        [pixels(one, records[k].get("sampling_rate")) for k, one in zip(chosen, some) if isinstance(one, Tensor)],
    )


def give_samples(tracker: Any, shown: TrackedSamples) -> None:
    """Give samples to a tracker in the form that it can show. A tracker that can show none gets none."""
    name = getattr(tracker, "name", None)
    if name == "wandb":
        # The step is left out, see `Trackers`.
        tracker.log({"iteration": shown.iteration, shown.tag: _for_wandb(shown)})
    elif shown.completions and hasattr(tracker, "log_table"):
        columns, rows = _table(shown)
        tracker.log_table(shown.tag, columns=columns, data=rows, step=shown.iteration)
    elif shown.completions and name not in NUMBERS_ONLY:
        text = "\n\n".join(map(_quoted, shown.records, shown.completions))
        tracker.log({shown.tag: text}, step=shown.iteration)
    elif shown.images and name == "tensorboard":
        tracker.log_images({shown.tag: _in_one_array(shown.images)}, step=shown.iteration, dataformats="NHWC")
        # TensorBoard numbers the images from 0 on and shows no text below them.
        captions = [_quoted(record, "", number) for number, record in enumerate(shown.records)]
        tracker.log({shown.tag: "\n\n".join(captions)}, step=shown.iteration)
    elif shown.images and hasattr(tracker, "log_images"):
        tracker.log_images({shown.tag: list(shown.images)}, step=shown.iteration)


def _for_wandb(shown: TrackedSamples) -> Any:
    import wandb  # type: ignore[import-not-found, unused-ignore]

    if shown.completions:
        columns, rows = _table(shown)
        return wandb.Table(columns=columns, data=rows)
    captions = [f"{record.get('prompt', '')}\n{_rewards(record)}".strip() for record in shown.records]
    return [wandb.Image(image, caption=caption) for image, caption in zip(shown.images, captions)]


def _table(shown: TrackedSamples) -> tuple[list[str], list[list[Any]]]:
    """Names of the columns and the rows; a reward that does not apply is None."""
    rewards = list(dict.fromkeys(name for record in shown.records for name in record.get("rewards", {})))
    rows = [
        [record.get("prompt", ""), completion, *(record.get("rewards", {}).get(name) for name in rewards)]
        for record, completion in zip(shown.records, shown.completions)
    ]
    return ["prompt", "completion", *(f"reward/{name}" for name in rewards)], rows


def _in_one_array(images: Sequence[np.ndarray]) -> np.ndarray:
    """[N, H, W, 3] images; smaller images get a black margin to the right and below."""
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    margins = [((0, height - image.shape[0]), (0, width - image.shape[1]), (0, 0)) for image in images]
    return np.stack([np.pad(image, margin) for image, margin in zip(images, margins)])


def _rewards(record: Mapping[str, Any]) -> str:
    rewards = record.get("rewards", {})
    return ", ".join(f"{name} {value:g}" for name, value in rewards.items() if value is not None)


def _quoted(record: Mapping[str, Any], completion: str, image: int | None = None) -> str:
    """A sample as Markdown. It is quoted as code, so nothing in it acts as markup."""
    lines = [*([] if image is None else [f"image {image}"])]
    lines += [*f"prompt: {record.get('prompt', '')}".splitlines(), f"rewards: {_rewards(record)}"]
    lines += ["", *completion.splitlines()] if completion else []
    return "\n".join(f"    {line}" for line in lines)
