"""Reads a run folder: the recipe, the metrics, and the samples, grouped by prompt and seed."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configs.publishing import publishable
from ..configs.run_recipes import measured_alike_since
from ..configs.yaml_text import read_yaml_mapping
from ..intake.links import check_links
from ..intake.run_folders import no_run
from ..votes.lines import read_jsonl
from ..votes.samples import SamplePair, finite_numbers, pair_samples, read_samples

DIGITS = 10
"""Most digits of the number of a step."""


@dataclass(frozen=True)
class Run:
    """What the gallery needs from a run folder."""

    folder: Path
    name: str
    config: dict[str, Any]  # the recipe, secrets removed
    metrics: tuple[dict[str, float], ...]  # by increasing "iteration", one entry each, finite values only
    steps: tuple[tuple[int, int, dict[str, float]], ...]  # (iteration, trained step, its statistics)
    pairs: tuple[SamplePair, ...]
    skipped: int  # lines that could not be read
    text: bool  # whether the samples are completions; else they are images
    alike_since: int = 0  # the first iteration whose evaluation has the settings of the last one

    @property
    def samples(self) -> Path:
        """The folder that image paths are relative to."""
        return self.folder / "samples"

    def iterations(self, phase: str) -> tuple[int, ...]:
        """Iterations at which there are samples of a phase, in increasing order."""
        return tuple(sorted({at for pair in self.pairs if pair.phase == phase for at in pair.shots}))


def read_run(folder: Path) -> Run:
    """Read a run folder written by `flowgrpo train`, finished or still running.

    Args:
        folder: holds `config.yaml`, `samples/index.jsonl` and, usually, `metrics.jsonl`.

    Raises:
        ValueError: the folder is not a run, has no samples, has links that lead out of it, or holds a record that does
            not follow the documentation.
    """
    check_links(folder)
    config_file, index = folder / "config.yaml", folder / "samples" / "index.jsonl"
    if not config_file.is_file():
        raise ValueError(no_run(folder))
    if not index.is_file():
        raise ValueError(
            f"{folder} has no samples yet: {index} does not exist. Build the gallery after the first evaluation."
        )
    config = publishable(read_yaml_mapping(config_file, "the recipe of the run, or train again"))
    samples, bad_samples = read_samples(index)
    metrics, steps, bad_metrics = read_metrics(folder / "metrics.jsonl")
    name = config.get("name")
    return Run(
        folder=folder,
        name=name if isinstance(name, str) and name.strip() else folder.resolve().name,
        config=config,
        metrics=metrics,
        steps=steps,
        pairs=pair_samples(samples),
        skipped=bad_samples + bad_metrics,
        text=samples[0].completion is not None,
        alike_since=measured_alike_since(folder),
    )


def is_iteration(record: Iterable[str]) -> bool:
    """Whether the names of a record are of an iteration; the line of the last evaluation has no rollout.

    If a reward scores no sample of an iteration, there is no total, and maybe no reward.
    """
    return any(name.startswith(("reward/", "time/")) for name in record)


def read_metrics(
    path: Path,
) -> tuple[tuple[dict[str, float], ...], tuple[tuple[int, int, dict[str, float]], ...], int]:
    """The finite numbers of `metrics.jsonl`: by iteration, and by trained step; and the number of unreadable lines.

    If an iteration was written twice (before and after a resume), the later values count.
    """
    if not path.is_file():
        return (), (), 0
    records, skipped = read_jsonl(path)
    rows: dict[int, dict[str, float]] = {}
    steps: dict[tuple[int, int], dict[str, float]] = {}
    for _, record in records:
        iteration = record.get("iteration")
        if not isinstance(iteration, int) or isinstance(iteration, bool):
            skipped += 1
            continue
        rows.setdefault(iteration, {}).update(finite_numbers(record))
        by_step = record.get("steps")
        for step, values in by_step.items() if isinstance(by_step, dict) else ():
            if step.isdecimal() and len(step) <= DIGITS and isinstance(values, dict):
                steps[iteration, int(step)] = finite_numbers(values)
    return (
        tuple(rows[iteration] for iteration in sorted(rows)),
        tuple((*place, steps[place]) for place in sorted(steps)),
        skipped,
    )
