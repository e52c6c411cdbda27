"""What a recipe says of its rewards together: corrected verdicts, gates, ensembles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..configs.sections import AdvantageConfig, RewardConfig
from ..core.combination import (
    gated_rewards,
    group_gated_rewards,
    uncertainty_weighted_rewards,
    worst_case_rewards,
)
from ..core.shaping import unlikeliness_rewards
from ..core.verifiers import corrected_rewards
from ..rewards.runner import RewardBatch

ENSEMBLES = {"worst": worst_case_rewards, "agreement": uncertainty_weighted_rewards}


def combine(
    scores: RewardBatch,
    groups: Tensor,
    rewards: Sequence[RewardConfig],
    settings: AdvantageConfig,
    log_probs: Tensor | None = None,
) -> RewardBatch:
    """The rewards that advantages are made of; what is logged and saved stays what the rewards said.

    Corrections come first, so that a gate compares what it is told, then gates, each from the values before any gate
    closed, then what a reward loses where its success was likely, then the ensemble, which leaves one column.

    Args:
        scores: as the rewards gave them, [L, K].
        groups: [L] ids of the groups.
        rewards: K entries of the recipe. A reward whose gate keeps it `apart` is NaN where the gate is closed.
        settings: for `how`.
        log_probs: [L] of whole samples, for rewards that ask how `unlikely` a success was.

    Raises:
        ValueError: `noise` on a reward that gave something other than 0, 1 and NaN.
    """
    values = scores.values.clone()
    for k, reward in enumerate(rewards):
        if reward.noise is not None:
            values[:, k] = _corrected(values[:, k], reward, scores.names[k])
    gated = values.clone()
    for k, reward in enumerate(rewards):
        if reward.gate is None:
            continue
        main = scores.values[:, scores.names.index(reward.gate.reward)]
        closed = torch.nan if reward.gate.closed is None or reward.gate.apart else reward.gate.closed
        if reward.gate.share is None:
            gated[:, k] = gated_rewards(values[:, k], main, threshold=reward.gate.at_least, closed=closed)
            continue
        success = (main >= reward.gate.at_least).to(main).masked_fill(main.isnan(), torch.nan)
        gated[:, k] = group_gated_rewards(values[:, k], success, groups, at_least=reward.gate.share, closed=closed)
    for k, reward in enumerate(rewards):
        if reward.unlikely is not None:
            assert log_probs is not None
            gated[:, k] = unlikeliness_rewards(gated[:, k], log_probs, groups, beta=reward.unlikely)
    if settings.how not in ENSEMBLES:
        return replace(scores, values=gated)
    one = ENSEMBLES[settings.how](gated * scores.weights)[:, None]
    return replace(scores, values=one, names=(settings.how,), weights=torch.ones(1))


def _corrected(values: Tensor, reward: RewardConfig, name: str) -> Tensor:
    assert reward.noise is not None
    try:
        return corrected_rewards(
            values, false_positive=reward.noise.false_positive, false_negative=reward.noise.false_negative
        )
    except ValueError as error:
        raise ValueError(f"reward {name} has `noise`, which is for verdicts of 0 and 1: {error}") from None
