"""The samples of all processes of a run together, for whatever compares beyond a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..configs.sections import ShapingConfig, StratumConfig
from ..rewards.runner import RewardBatch
from .data import PromptRow
from .processes import Processes
from .readings import answers_of, shaping_values
from .strata import stratum_ids, stratum_values
from .tasks import Collected


@dataclass(frozen=True)
class Pooled:
    """L samples in the order of their prompts, the same on every process.

    Attributes:
        scores: [L, K], without sub-scores, notes and parts, and of answers those that were asked for.
        prompts: [L] ids of their prompts, which stay the same over the run.
        groups: [L] ids of the groups in which samples are compared.
        outcomes: [L] bool: samples that are results.
        lengths: [L] tokens; of completions only.
        log_probs: [L] of whole samples, by the sampler; of completions only.
        strata: [L] ids of samples of one kind; only where the recipe distinguishes them.
        mine: where the samples of this process are.
        signal: [L] what advantages are shaped by; only where the recipe does.
        divergence: [L] how far the policy has moved since it last saw the prompt, NaN if never; only where it counts.
    """

    scores: RewardBatch
    prompts: list[int]
    groups: Tensor
    outcomes: Tensor
    lengths: Tensor | None
    log_probs: Tensor | None
    strata: Tensor | None
    mine: list[int]
    signal: Tensor | None = None
    divergence: Tensor | None = None


def pooled(
    processes: Processes,
    places: Sequence[int],
    rows: Sequence[PromptRow],
    experience: Collected,
    scores: RewardBatch,
    stratum: StratumConfig | None = None,
    shaping: ShapingConfig | None = None,
    answers: Mapping[str, str] | None = None,
    divergence: Sequence[float] | None = None,
) -> Pooled:
    """Bring the samples of all processes together. All must call it.

    Args:
        processes: of the run.
        places: [P] number of each prompt of this process among those of the iteration.
        rows: [P] prompts of this process.
        experience: samples of them.
        scores: of the samples.
        stratum: what tells kinds of samples apart, if anything does.
        shaping: which signal shapes advantages, if any does.
        answers: rewards whose answers are needed -> the key of the recipe that asks for them.
        divergence: of each sample, where the recipe measures it.

    Raises:
        ValueError: a reward lacks the sub-score or the answers.
    """
    owners, lengths = experience.prompt_of_sample, getattr(experience, "lengths", None)
    chances, asked = getattr(experience, "log_probs", None), answers or {}
    read = [answers_of(scores, reward, key) for reward, key in asked.items()]
    columns = (
        [places[p] for p in owners],
        [rows[p].id for p in owners],
        experience.groups.tolist(),
        experience.outcomes.tolist(),
        [0] * len(owners) if lengths is None else lengths.tolist(),
        [0.0] * len(owners) if chances is None else chances.tolist(),
        scores.values.tolist(),
        [0.0] * len(owners) if stratum is None else stratum_values(scores, stratum),
        [0.0] * len(owners) if shaping is None else shaping_values(scores, shaping),
        list(zip(*read)) if read else [()] * len(owners),
        [0.0] * len(owners) if divergence is None else divergence,
    )
    everything, mine = processes.pool(list(zip(*columns, strict=True)), columns[0])
    at, ids, groups, outcomes, counts, likely, values, kinds, signal, found, moved = zip(*everything, strict=True)
    # Each process numbers its groups by itself; none has samples of two prompts.
    names: dict[tuple[int, int], int] = {}
    known = [names.setdefault(pair, len(names)) for pair in zip(at, groups)]
    return Pooled(
        scores=replace(
            scores,
            values=torch.tensor(values),
            sub_scores={},
            notes={},
            parts={},
            answers=dict(zip(asked, map(list, zip(*found)))),
        ),
        prompts=list(ids),
        groups=torch.tensor(known),
        outcomes=torch.tensor(outcomes),
        lengths=None if lengths is None else torch.tensor(counts),
        log_probs=None if chances is None else torch.tensor(likely, dtype=torch.float64),
        strata=None if stratum is None else stratum_ids(kinds, stratum.edges),
        mine=mine,
        signal=None if shaping is None else torch.tensor(signal, dtype=torch.float64),
        divergence=None if divergence is None else torch.tensor(moved, dtype=torch.float64),
    )
