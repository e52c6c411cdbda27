"""What a run writes down of its iterations and samples, in its folder and for trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.diagnostics import degenerate_groups, summarise
from ...rewards.runner import RewardBatch
from ..credit.pooling import Batch, Pooled
from ..data import PromptRow
from ..distributed.processes import Processes
from ..folder.run_folder import pixels
from ..tasks import Collected

ADDED = ("evaluations", "tokens", "samples")
LARGEST = ("rounds",)
SHOWN = 16
"""Samples of a call that trackers get; the run folder has all of them."""


def number(value: Tensor) -> float | None:
    """A number for JSON; None for what is not finite."""
    found = float(value)
    return found if math.isfinite(found) else None


def reward_means(values: Tensor) -> Tensor:
    """[K] means of rewards [L, K] over the samples to which they apply; NaN where there are none."""
    return values.nansum(0) / (~values.isnan()).float().sum(0)


def standard_errors(values: Tensor, owners: Tensor) -> Tensor:
    """[K] standard errors of the means over prompts of rewards [L, K], by the prompt [L] of each sample.

    Samples of one prompt are alike, so they count as one. NaN where a reward applies to fewer than two prompts.
    """
    means = torch.stack([reward_means(values[owners == owner]) for owner in owners.unique()])
    known = ~means.isnan()
    count = known.sum(0)
    centred = torch.where(known, means - reward_means(means), 0.0)
    return (centred.square().sum(0) / (count - 1) / count).sqrt()


def reward_record(pooled: Pooled) -> dict[str, Any]:
    """Metrics of the rewards of a rollout."""
    scores, results = pooled.scores, pooled.outcomes
    means, counted = reward_means(scores.values[results]), scores.counted()
    degenerate, groups = degenerate_groups(counted.values[results], pooled.groups[results])
    return {
        **{f"reward/{name}": number(mean) for name, mean in zip(scores.names, means)},
        "reward/total": number((means * scores.weights)[scores.weights != 0].sum()),
        "degenerate_groups": number(degenerate / groups),
    }


Updated = tuple[Tensor, dict[str, Tensor], Tensor]
"""What the optimizer steps of a rollout leave on a process: the first three arguments of `update_record`."""


def joint_update(parts: Sequence[Updated]) -> Updated:
    """Those of several processes as one."""
    sums: dict[str, Tensor] = {}
    for _, found, _ in parts:
        sums |= {name: sums[name] + value if name in sums else value for name, value in found.items()}
    statistics = torch.stack([part[0] for part in parts]).sum(0)
    return statistics, sums, torch.stack([part[2] for part in parts]).amax(0)


def joint_record(records: Sequence[Mapping[str, float]], sizes: Sequence[int]) -> dict[str, float]:
    """What several rollouts record as one: sums of what adds up, else means over their samples.

    Args:
        records: of each, as `Collected.record` has it; what one lacks is 0.
        sizes: samples of each.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name, 0.0) for record in records]
        if name in LARGEST:
            found[name] = max(values)
        elif name in ADDED:
            found[name] = sum(values)
        else:
            found[name] = sum(value * (size / sum(sizes)) for value, size in zip(values, sizes))
    return found


def update_record(
    statistics: Tensor, sums: Mapping[str, Tensor], first_error: Tensor, norms: Sequence[Tensor]
) -> dict[str, Any]:
    """Metrics of the optimizer steps of one rollout.

    Args:
        statistics: [steps, 2, 5] of `core.diagnostics.step_statistics`.
        sums: metric -> [sum, count].
        first_error: largest absolute log-ratio before the first step.
        norms: of the gradients.
    """
    record: dict[str, Any] = {"ratio/first_error": number(torch.expm1(first_error))}
    for name, (total, count) in sums.items():
        record[name if name != "ratio" else "ratio/mean"] = number(total / count)
    record["grad_norm"] = number(torch.stack(list(norms)).mean())
    by_step = summarise(statistics)
    trained = [int(i) for i in by_step["count"].nonzero().flatten()]
    record["steps"] = {str(i): {key: number(values[i]) for key, values in by_step.items()} for i in trained}
    return record


def sample_records(
    rows: Sequence[PromptRow], experience: Collected, scores: RewardBatch, numbers: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """[L] what the index of samples holds of each, but for phase, iteration and the sample itself.

    Args:
        rows: P prompts.
        experience: L samples of them.
        scores: of the samples.
        numbers: [L] of each its number among those of all processes; in their order if left out.
    """
    seen: dict[int, int] = {}
    records = []
    origins = experience.origins()
    for sample, owner in enumerate(experience.prompt_of_sample):
        row = rows[owner]
        seed = seen[owner] = seen.get(owner, -1) + 1
        records.append(
            {
                "prompt": row.text,
                "prompt_id": row.id,
                "seed": seed,
                "sample": sample if numbers is None else numbers[sample],
                **origins[sample],
                **scores.record(sample),
                "columns": row.columns,
            }
        )
    return records


def track_samples(
    trackers: Sequence[Any],
    phase: str,
    iteration: int,
    samples: Tensor | list[str],
    records: Sequence[Mapping[str, Any]],
) -> None:
    """Give some samples to trackers: images to those that take images, completions as text with their rewards.

    The samples are spread over the call, so that they are not all of the first prompts.
    """
    if not trackers:
        return
    count = len(records)
    chosen = sorted({k * count // min(count, SHOWN) for k in range(min(count, SHOWN))})
    if isinstance(samples, list):
        text = "\n\n".join(_quoted(records[k], samples[k]) for k in chosen)
        for tracker in trackers:
            tracker.log({f"samples/{phase}": text}, step=iteration)
        return
    images = np.stack([pixels(samples[k]) for k in chosen])
    for tracker in trackers:
        if getattr(tracker, "name", None) == "tensorboard":
            tracker.log_images({f"samples/{phase}": images}, step=iteration, dataformats="NHWC")
        elif hasattr(tracker, "log_images"):
            tracker.log_images({f"samples/{phase}": list(images)}, step=iteration)


def _quoted(record: Mapping[str, Any], completion: str) -> str:
    """A completion as Markdown, in which nothing of it is markup."""
    rewards = ", ".join(f"{name} {value:g}" for name, value in record["rewards"].items() if value is not None)
    lines = [f"prompt: {record['prompt']}", f"rewards: {rewards}", "", *completion.splitlines()]
    return "\n".join(f"    {line}" for line in lines)


def batch_record(processes: Processes, batch: Batch, advantages: Tensor) -> dict[str, Any]:
    """Metrics of the samples of all processes, and of the advantages [N] of their nodes. All must call it."""
    # A mean would round by the order of the nodes.
    largest = advantages.nan_to_num(0.0).abs().amax().item() if advantages.numel() else 0.0
    mine = batch.experience.record(), len(batch.scores.values), largest
    records, sizes, found = zip(*processes.gather(mine))
    return joint_record(records, sizes) | {"advantage/largest": max(found)}
