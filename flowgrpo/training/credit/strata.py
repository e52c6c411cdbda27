"""The stratum of a sample within its group, by the score of a reward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from pydantic import Field, field_validator
from torch import Tensor

from ...parts.choice import Choice
from ...parts.section import Section

if TYPE_CHECKING:
    from ...rewards.runner import RewardBatch


class Stratum(Section):
    """The value by which samples of a prompt are alike: a reward, or one of its sub-scores.

    Columns of the prompt file are the same for all samples of a prompt, so they make no strata.
    """

    reward: str = Field(description="Label (or name) of a reward; with `weight: 0` the reward makes strata only.")
    sub_score: str | None = Field(None, description="One of its sub-scores; the reward itself if left out.")
    edges: list[float] = Field(
        default_factory=list,
        description="Rising limits between strata; each distinct value is a stratum if left out.",
    )

    @field_validator("edges")
    @classmethod
    def _rise(cls, edges: list[float]) -> list[float]:
        if any(not low < high for low, high in pairwise(edges)):
            raise ValueError(f"edges are {edges}; give rising numbers")
        return edges


def stratum_of(advantage: Choice | None) -> Stratum | None:
    """Which samples are alike, for an advantage with an option `stratum`."""
    found = None if advantage is None else advantage.get("stratum")
    return found if isinstance(found, Stratum) else None


def signal_values(scores: RewardBatch, reward: str, sub_score: str | None, key: str) -> list[float]:
    """[L] scores of samples by a reward, or by one of its sub-scores; NaN where there is no score.

    Args:
        scores: of L samples, as the rewards gave them.
        reward: label.
        sub_score: name; None for the reward itself.
        key: the key of the recipe that names the reward, for the message.

    Raises:
        ValueError: the reward has no such sub-score.
    """
    if sub_score is None:
        return scores.values[:, scores.names.index(reward)].tolist()
    known = scores.sub_scores.get(reward, {})
    if sub_score not in known:
        raise ValueError(
            f"{key} asks reward {reward} for the sub-score {sub_score!r}, which it does not give; it gives "
            f"{', '.join(known) or 'none, so leave `sub_score` out to take the reward itself'}"
        )
    return known[sub_score]


def stratum_values(scores: RewardBatch, stratum: Stratum) -> list[float]:
    """[L] values that decide the strata; NaN where there is no score.

    Args:
        scores: of L samples, as the rewards gave them.
        stratum: which score to take.

    Raises:
        ValueError: the reward has no such sub-score.
    """
    return signal_values(scores, stratum.reward, stratum.sub_score, "advantage.stratum")


def stratum_ids(values: Sequence[float], edges: Sequence[float]) -> Tensor:
    """[L] integer ids of strata; NaN has the stratum -1.

    Args:
        values: [L].
        edges: rising; a value belongs to the stratum above the last edge that it reaches. Without edges, each distinct
            value is a stratum.
    """
    column = torch.tensor(values, dtype=torch.float64)
    if edges:
        ids = torch.bucketize(column, torch.tensor(edges, dtype=torch.float64), right=True)
    else:
        ids = torch.unique(column.nan_to_num(), return_inverse=True)[1]
    return ids.masked_fill(column.isnan(), -1)
