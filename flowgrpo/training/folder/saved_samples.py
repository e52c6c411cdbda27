"""Samples of a run, saved in its folder."""

from __future__ import annotations

from typing import Any

from ..credit.pooling import Batch
from ..distributed.processes import Processes
from ..reporting.records import sample_records
from ..reporting.tracking import Trackers
from .rendered_images import write_rendered
from .run_folder import RunFolder


def save_samples(
    batch: Batch | None, phase: str, iteration: int, run: RunFolder, processes: Processes, trackers: Trackers
) -> None:
    """Write the samples of this process; the main process writes the index of all. Every process must call it.

    A process has no batch if there are fewer prompts than processes. Of a group, the first process writes.
    """
    if not processes.leads:
        batch = None
    owners = [] if batch is None else batch.owners
    numbers = processes.pool(owners, owners)[1]
    lines: list[dict[str, Any]] = []
    if batch is not None:
        records = sample_records(batch.rows, batch.experience, batch.scores, numbers)
        for record, owner in zip(records, batch.experience.prompt_of_sample, strict=True):
            if pictures := run.prompt_pictures.of(batch.rows[owner]):
                record["pictures"] = pictures
        stem = f"{run.iteration_folder(iteration).name}/{phase}"
        for record, made in zip(
            records, write_rendered(run.samples, stem, batch.scores.rendered, numbers), strict=True
        ):
            record.update(made)
        lines = run.write_samples(phase, iteration, batch.experience.samples, records, numbers)
        trackers.samples(phase, iteration, batch.experience.samples, records)
    everything = processes.pool(lines, owners)[0]
    if processes.rank == 0:
        run.index_samples(everything)
