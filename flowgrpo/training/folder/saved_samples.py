"""Prompts of one process with what was made of them: sampled for an evaluation, scored, and saved."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ...core.addressing import address
from ...rewards.runner import RewardBatch, RewardSet
from ...weights.averages import Ema
from ..data import PromptRow, columns_of
from ..distributed.processes import Processes
from ..reporting.clock import Clock
from ..reporting.records import joint_record, number, reward_means, sample_records, standard_errors, track_samples
from ..tasks import Collected, Task
from .run_folder import RunFolder

EVALUATION_SEED = 20_260_101


def evaluation_key(row: PromptRow) -> int:
    """What addresses the randomness of a held-out prompt, the same in every evaluation."""
    return address(EVALUATION_SEED, 2, row.id)


def asked(rows: Sequence[PromptRow], experience: Collected) -> tuple[Any, list[str], dict[str, list[Any]], Tensor]:
    """What rewards are asked of a rollout of the prompts: samples, texts, columns and groups."""
    owners = [rows[p] for p in experience.prompt_of_sample]
    columns = columns_of(owners, experience.parts)
    return experience.samples, [row.text for row in owners], columns, experience.groups


@dataclass(frozen=True)
class Batch:
    """Prompts of one process with their samples and scores.

    Attributes:
        places: their numbers among those of all processes.
        rows: the prompts, in the same order.
        experience: their samples; `Collected`, and whatever else those of its task have.
        scores: of the samples.
        columns: name -> what all processes should know of each sample; extensions fill it.
    """

    places: Sequence[int]
    rows: Sequence[PromptRow]
    experience: Any
    scores: RewardBatch
    columns: dict[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def owners(self) -> list[int]:
        """Of each sample the number of its prompt."""
        return [self.places[p] for p in self.experience.prompt_of_sample]


def batch_record(processes: Processes, batch: Batch, advantages: Tensor) -> dict[str, Any]:
    """Metrics of the samples of all processes, and of the advantages [N] of their nodes. All must call it."""
    # A mean would round by the order of the nodes.
    largest = advantages.nan_to_num(0.0).abs().amax().item() if advantages.numel() else 0.0
    mine = batch.experience.record(), len(batch.scores.values), largest
    records, sizes, found = zip(*processes.gather(mine))
    return joint_record(records, sizes) | {"advantage/largest": max(found)}


def save_samples(
    batch: Batch | None, phase: str, iteration: int, run: RunFolder, processes: Processes, accelerator: Accelerator
) -> None:
    """Each process writes its samples, the main one the index of all. All must call it.

    A process has no batch where there are fewer prompts than processes.
    """
    owners = [] if batch is None else batch.owners
    numbers = processes.pool(owners, owners)[1]
    lines: list[dict[str, Any]] = []
    if batch is not None:
        records = sample_records(batch.rows, batch.experience, batch.scores, numbers)
        lines = run.write_samples(phase, iteration, batch.experience.samples, records, numbers)
        if accelerator.is_main_process:
            track_samples(accelerator.trackers, phase, iteration, batch.experience.samples, records)
    everything = processes.pool(lines, owners)[0]
    if accelerator.is_main_process:
        run.index_samples(everything)


def evaluated(
    task: Task, heldout: Sequence[PromptRow], rewards: RewardSet, ema: Ema | None, processes: Processes, clock: Clock
) -> tuple[Batch | None, dict[str, float | None]]:
    """Held-out prompts sampled with fixed seeds and averaged weights: this process's share, and of all the means with
    their standard errors."""
    places = processes.share(len(heldout))
    rows = [heldout[place] for place in places]
    keys = [evaluation_key(row) for row in rows]
    batch, mine, numbers = None, [], []
    if rows:
        with ema.applied() if ema else nullcontext():
            experience = task.evaluation(rows, keys, clock)
        batch = Batch(places, rows, experience, rewards.score(*asked(rows, experience)))
        numbers = batch.owners
        mine = list(zip(numbers, batch.scores.values.tolist()))
    owners, values = zip(*processes.pool(mine, numbers)[0])
    means, errors = reward_means(torch.tensor(values)), standard_errors(torch.tensor(values), torch.tensor(owners))
    record = {f"eval/{name}": number(mean) for name, mean in zip(rewards.names, means)}
    return batch, record | {f"eval_error/{name}": number(error) for name, error in zip(rewards.names, errors)}
