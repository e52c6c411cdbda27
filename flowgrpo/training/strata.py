"""In which stratum of its group a sample is, by what a reward says of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..configs.sections import StratumConfig
from ..rewards.runner import RewardBatch
from .readings import signal_values


def stratum_values(scores: RewardBatch, settings: StratumConfig) -> list[float]:
    """[L] what strata are made of; NaN where the reward says nothing.

    Args:
        scores: of L samples, as the rewards gave them.
        settings: which of them.

    Raises:
        ValueError: the reward has no such sub-score.
    """
    return signal_values(scores, settings.reward, settings.sub_score, "advantage.stratum")


def stratum_ids(values: Sequence[float], edges: Sequence[float]) -> Tensor:
    """[L] integer ids; NaN is a stratum too, -1.

    Args:
        values: [L].
        edges: rising; a value belongs to the stratum above the last edge that it reaches. Without any, each distinct
            value is a stratum.
    """
    column = torch.tensor(values, dtype=torch.float64)
    if edges:
        ids = torch.bucketize(column, torch.tensor(edges, dtype=torch.float64), right=True)
    else:
        ids = torch.unique(column.nan_to_num(), return_inverse=True)[1]
    return ids.masked_fill(column.isnan(), -1)
