"""What a run records of its iterations and samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.diagnostics import degenerate_groups, rank_correlations, summarise
from ...pipelines.experience import Scouted
from ...rewards.base import SAMPLING_RATE
from ...rewards.runner import RewardBatch
from ..credit.combining import total_reward
from ..credit.pooling import Batch, Pooled
from ..data import PromptRow
from ..distributed.processes import Processes
from ..joined_rollouts import joint_record
from ..tasks import Collected


def number(value: Tensor) -> float | None:
    """The value as a number for JSON, or None if it is not finite."""
    found = float(value)
    return found if math.isfinite(found) else None


def reward_means(values: Tensor) -> Tensor:
    """[K] means of rewards [L, K] over the samples to which they apply; NaN where there are none."""
    return values.nansum(0) / (~values.isnan()).float().sum(0)


def standard_errors(values: Tensor, owners: Tensor) -> Tensor:
    """[K] standard errors of the means of rewards [L, K], by the prompt [L] of each sample.

    The samples of one prompt depend on each other, so a prompt counts as one draw, with the weight that it has in the
    mean: its number of samples. This is the error of a ratio of two means (Cochran, Sampling Techniques, chapter 6).
    NaN if a reward applies to fewer than two prompts.
    """
    known = ~values.isnan()
    away = torch.where(known, values - reward_means(values), 0.0)
    numbers = owners.unique(return_inverse=True)[1]
    sums, sizes = (
        one.new_zeros(len(owners), one.shape[1]).index_add(0, numbers, one) for one in (away, known.to(away))
    )
    prompts = (sizes > 0).sum(0)
    errors = (sums.square().sum(0) * prompts / (prompts - 1)).sqrt() / sizes.sum(0)
    return torch.where(prompts > 1, errors, torch.nan)


def reward_record(pooled: Pooled) -> dict[str, Any]:
    """Metrics of the rewards of a rollout."""
    scores, results = pooled.scores, pooled.outcomes
    means, counted = reward_means(scores.values[results]), scores.counted()
    errors = standard_errors(scores.values[results], torch.tensor(pooled.prompts)[results])
    degenerate, groups = degenerate_groups(counted.values[results], pooled.groups[results])
    missing = scores.values[results].isnan().float().mean(0)
    return {
        **{f"reward/{name}": number(mean) for name, mean in zip(scores.names, means)},
        **{f"reward_error/{name}": number(error) for name, error in zip(scores.names, errors)},
        # A reward may leave samples out by mistake, and their mean does not show it.
        **{f"reward_missing/{name}": float(share) for name, share in zip(scores.names, missing) if share > 0},
        "reward/total": number((means * scores.weights)[scores.weights != 0].sum()),
        "degenerate_groups": number(degenerate / groups),
    }


Updated = tuple[Tensor, dict[str, Tensor], Tensor]
"""What one process measures in the optimizer steps of a rollout: the first three arguments of `update_record`."""


def joint_update(parts: Sequence[Updated]) -> Updated:
    """Join the measurements of several processes into one."""
    sums: dict[str, Tensor] = {}
    for _, found, _ in parts:
        sums |= {name: sums[name] + value if name in sums else value for name, value in found.items()}
    statistics = torch.stack([part[0] for part in parts]).sum(0)
    return statistics, sums, torch.stack([part[2] for part in parts]).amax(0)


def update_record(
    statistics: Tensor, sums: Mapping[str, Tensor], first_error: Tensor, norms: Sequence[Tensor]
) -> dict[str, Any]:
    """Metrics of the optimizer steps of one rollout.

    Args:
        statistics: [steps, 2, 5] of `core.diagnostics.step_statistics`.
        sums: metric -> [sum, count].
        first_error: largest absolute log-ratio before the first step.
        norms: norms of the gradients, one for each optimizer step.
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
    """[L] records for the index of samples, without phase, iteration and the sample itself.

    Args:
        rows: P prompts.
        experience: L samples for these prompts.
        scores: the scores of the samples.
        numbers: [L] number of each sample among the samples of all processes; 0 to L - 1 if left out.
    """
    seen: dict[int, int] = {}
    records = []
    origins = experience.origins()
    given = experience.given()
    cut, rates = given.get("truncated"), given.get(SAMPLING_RATE)
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
                **({} if row.messages is None else {"messages": list(row.messages)}),
                **({} if cut is None else {"truncated": bool(cut[sample])}),
                **({} if rates is None else {SAMPLING_RATE: int(rates[sample])}),
                **scores.record(sample),
                "columns": dict(row.columns),
            }
        )
    return records


def batch_record(processes: Processes, batch: Batch, advantages: Tensor) -> dict[str, Any]:
    """Metrics of the samples of all processes, and of the advantages [N] of this process's nodes.

    All processes must call it.
    """
    # A mean would be rounded differently for another order of the nodes.
    largest = advantages.nan_to_num(0.0).abs().amax().item() if advantages.numel() else 0.0
    mine = batch.experience.record(), len(batch.scores.values), largest, scouts_measured(batch)
    records, sizes, found, scouts = zip(*processes.gather(mine))
    return joint_record(records, sizes) | scouts_record(scouts) | {"advantage/largest": max(found)}


Measured = list[tuple[float, float, float]]
"""For each prompt, the sum of its scouts' scores, their number, and the rank correlation with its images' scores."""


def scouts_measured(batch: Batch) -> Measured:
    """What the scouts of this process say about the images of their seeds; empty if there were no scouts."""
    scouted: Sequence[Scouted] = batch.experience.scouted
    if not scouted:
        return []
    before = torch.cat([one.scores.gather(1, one.numbers).flatten() for one in scouted])
    ranks = rank_correlations(before, total_reward(batch.scores, batch.experience), batch.experience.groups)
    sums = torch.cat([one.scores.double().nansum(1) for one in scouted])
    counts = torch.cat([(~one.scores.isnan()).double().sum(1) for one in scouted])
    return list(zip(sums.tolist(), counts.tolist(), ranks.tolist()))


def scouts_record(parts: Sequence[Measured]) -> dict[str, float | None]:
    """Metrics of the scouts of all processes; none if there were no scouts."""
    sums, counts, ranks = zip(*(prompt for part in parts for prompt in part)) if any(parts) else ((), (), ())
    known = [rank for rank in ranks if math.isfinite(rank)]
    if not sums:
        return {}
    return {
        "scouts/reward": math.fsum(sums) / sum(counts) if sum(counts) else None,
        "scouts/rank": math.fsum(known) / len(known) if known else None,
    }
