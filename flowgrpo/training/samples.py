"""Prompts of one process with what was made of them: sampled for an evaluation, scored, and saved."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..core.addressing import address
from ..pipelines.ema import Ema
from ..rewards.runner import RewardBatch, RewardSet
from .clock import Clock
from .data import PromptRow, columns_of
from .processes import Processes
from .records import number, reward_means, sample_records, standard_errors, track_samples
from .run_folder import RunFolder
from .tasks import Collected, Task

EVALUATION_SEED = 20_260_101


def evaluation_key(row: PromptRow) -> int:
    """What addresses the randomness of a held-out prompt, the same in every evaluation."""
    return address(EVALUATION_SEED, 2, row.id)


def asked(rows: Sequence[PromptRow], experience: Collected) -> tuple[Any, list[str], dict[str, list[Any]], Tensor]:
    """What rewards are asked of a rollout of the prompts: samples, texts, columns and groups."""
    owners = [rows[p] for p in experience.prompt_of_sample]
    columns = columns_of(owners, getattr(experience, "parts", None))
    return experience.samples, [row.text for row in owners], columns, experience.groups


@dataclass(frozen=True)
class Batch:
    """Prompts of one process and their samples.

    Attributes:
        places: their numbers among those of all processes.
        rows: the prompts, in the same order.
        experience, scores: of their samples; None where there are fewer prompts than processes and this one has none.
    """

    places: Sequence[int]
    rows: Sequence[PromptRow]
    experience: Collected | None
    scores: RewardBatch | None

    @property
    def owners(self) -> list[int]:
        """Of each sample the number of its prompt."""
        return [] if self.experience is None else [self.places[p] for p in self.experience.prompt_of_sample]

    def save(self, phase: str, iteration: int, run: RunFolder, processes: Processes, accelerator: Accelerator) -> None:
        """Each process writes its samples, the main one the index of all."""
        numbers = processes.pool(self.owners, self.owners)[1]
        lines: list[dict[str, Any]] = []
        if self.experience is not None and self.scores is not None:
            records = sample_records(self.rows, self.experience, self.scores, numbers)
            lines = run.write_samples(phase, iteration, self.experience.samples, records, numbers)
            if accelerator.is_main_process:
                track_samples(accelerator.trackers, phase, iteration, self.experience.samples, records)
        everything = processes.pool(lines, self.owners)[0]
        if accelerator.is_main_process:
            run.index_samples(everything)


def evaluated(
    task: Task, heldout: Sequence[PromptRow], rewards: RewardSet, ema: Ema | None, processes: Processes, clock: Clock
) -> tuple[Batch, dict[str, float | None]]:
    """Held-out prompts sampled with fixed seeds and averaged weights: this process's share, and of all the means with
    their standard errors."""
    places = processes.share(len(heldout))
    rows = [heldout[place] for place in places]
    keys = [evaluation_key(row) for row in rows]
    experience, scores = None, None
    if rows:
        with ema.applied() if ema else nullcontext():
            experience = task.evaluation(rows, keys, clock)
        scores = rewards.score(*asked(rows, experience))
    batch = Batch(places, rows, experience, scores)
    mine = [] if scores is None else list(zip(batch.owners, scores.values.tolist()))
    owners, values = zip(*processes.pool(mine, batch.owners)[0])
    means, errors = reward_means(torch.tensor(values)), standard_errors(torch.tensor(values), torch.tensor(owners))
    record = {f"eval/{name}": number(mean) for name, mean in zip(rewards.names, means)}
    return batch, record | {f"eval_error/{name}": number(error) for name, error in zip(rewards.names, errors)}
