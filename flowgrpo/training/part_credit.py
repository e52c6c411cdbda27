"""Advantages of tokens from rewards that score the parts of a completion: what follows counts, what was before not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..configs.sections import AdvantageConfig
from ..core.advantages import as_precise, group_advantages, weighted_total
from ..core.minima import minimum_returns, minimum_weighted_rewards
from ..core.parts import later_returns, part_advantages
from ..rewards.runner import RewardBatch
from .combining import peers_of

if TYPE_CHECKING:
    from .text_policy import Completions


def parts_credit(
    experience: Completions, scores: RewardBatch, settings: AdvantageConfig, critic: object, *, later: bool = True
) -> Tensor:
    """Rank-GRPO (2510.20150): the scores from a part on, compared by place in the group; without `later` its own.

    Those are the paper's two forms of a rank's return. [N, T].
    """
    own, whole = scores_of_parts(experience, scores, settings.credit)
    returns = later_returns(own) if later else own
    return _by_token(experience, returns + whole[:, None], settings, "place")


def minimum_credit(
    experience: Completions, scores: RewardBatch, settings: AdvantageConfig, *, temperature: float = 0.0
) -> Tensor:
    """PURE (2504.15275): the least score from a part on, compared with all parts of the group; [N, T].

    With a `temperature` above 0 the sum of softmin-weighted scores from the part on, as in the paper's own training.
    """
    own, whole = scores_of_parts(experience, scores, settings.credit)
    return _by_token(experience, least_returns(own, temperature) + whole[:, None], settings, "group")


def least_returns(step_rewards: Tensor, temperature: float) -> Tensor:
    """PURE's returns [B, K] of steps: the least reward from each on, softly if `temperature` is above 0."""
    returns = minimum_returns(step_rewards)
    if not temperature:
        return returns
    soft = later_returns(minimum_weighted_rewards(step_rewards, temperature=temperature))
    return soft.masked_fill(returns.isnan(), torch.nan)


def scores_of_parts(experience: Completions, scores: RewardBatch, credit: str) -> tuple[Tensor, Tensor]:
    """Weighted sums of the rewards that score parts [N, K], and of those that score completions as wholes [N].

    A part without any score is NaN, and so are all of a completion that does not count. A score that one reward lacks
    and another has counts as its mean over the parts in the same place of the group. Where a reward of wholes does not
    apply, its mean over the group stands in; the sums are counted from those means.

    Raises:
        ValueError: no reward scores parts; completions are never cut without a recipe that says how.
    """
    assert experience.parts is not None
    weights = scores.weights.tolist()
    if not any(weight and name in scores.parts for name, weight in zip(scores.names, weights)):
        raise ValueError(
            f"advantage.credit {credit} takes scores of the parts of completions, and the rewards "
            f"({', '.join(scores.names)}) gave none; use one that returns Scores(..., parts=...), such as equations"
        )
    width = max(len(texts) for texts in experience.parts.texts)
    whole = as_precise(torch.zeros(len(scores.values)))
    columns, factors = list[Tensor](), list[float]()
    for name, values, weight in zip(scores.names, scores.values.T, weights):
        if not weight:
            continue
        if name not in scores.parts:
            whole = whole + weight * group_advantages(as_precise(values), experience.groups, scale="none")
            continue
        rows = [[] if row is None else row for row in scores.parts[name]]
        columns.append(padded(rows, width, torch.nan).to(whole).flatten())
        factors.append(weight)
    place = peers_of(experience)[:, None] * width + torch.arange(width)
    own = weighted_total(torch.stack(columns, 1), place.flatten(), factors).reshape(place.shape)
    return own.masked_fill(~experience.outcomes[:, None], torch.nan), whole


def padded(rows: Sequence[Sequence[Any]], width: int, value: float) -> Tensor:
    """[B, width] of ragged rows, `value` after their ends."""
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def _by_token(experience: Completions, returns: Tensor, settings: AdvantageConfig, among: str) -> Tensor:
    assert experience.parts is not None
    advantages = part_advantages(
        returns, experience.groups, among=among, scale=settings.scale, eps=settings.eps, ddof=settings.ddof
    )
    ids = experience.parts.ids
    width = max(len(row) for row in ids)
    mine = advantages.gather(1, padded(ids, width, 0))
    return torch.where(torch.arange(width) < experience.lengths[:, None], mine, 0.0).float()
