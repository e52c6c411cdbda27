"""Advantages of the tokens of completions, by the places where completions diverge, or by scores of their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.advantages import as_precise, group_advantages, weighted_total
from ...core.part_credit import later_returns, part_advantages
from ...core.prefix_tree import prefix_tree_advantages
from ...core.worst_step import minimum_returns, minimum_weighted_rewards
from ...parts.needs import Need, needs
from ...parts.ranges import NotNegative
from ...parts.traits import part_scores
from ...rewards.runner import RewardBatch
from .combining import peers_of
from .conditions import compares_itself, group_of_two, of_tokens, scores_of_parts, undivided
from .scales import Ddof, ScaleWithin

if TYPE_CHECKING:
    from ..text.text_policy import Completions
    from .credits import Judged


@needs(
    Need("task", ("text",), "reads the tokens of completions", mend="use depth for a tree of images"),
    compares_itself, group_of_two, of_tokens,
)  # fmt: skip
def prefix(judged: Judged, *, root: bool = False, eps: NotNegative = 1e-4, ddof: Ddof = 1) -> Tensor:
    """The group's advantage, plus what a token gained where completions diverge (TEMPO, arXiv 2509.18314).

    Args:
        judged: of completions.
        root: whether the first token is also a place where completions diverge.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    experience = judged.experience
    return prefix_tree_advantages(
        experience.sampled.ids, judged.rewards(), experience.groups, contexts=experience.context_numbers(), root=root,
        eps=eps, ddof=ddof,
    )  # fmt: skip


@part_scores
@needs(
    Need(
        "task", ("text",), "takes the scores of the parts of completions",
        mend="for images use value, turning or minimum, which take the scores of their states",
    ),
    compares_itself, group_of_two, of_tokens, scores_of_parts, undivided,
)  # fmt: skip
def parts(
    judged: Judged,
    *,
    later: bool = True,
    scale: ScaleWithin = "group",
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """The scores from a part on, compared with the parts in the same place of the group (Rank-GRPO, arXiv 2510.20150).

    Args:
        judged: of completions.
        later: whether the return of a part includes the scores of later parts. If not, it is the part's own score. The
            paper has both forms.
        scale: what returns are divided by: their standard deviation, or nothing.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    own, whole = by_part(judged.experience, judged.scores, "parts")
    returns = (later_returns(own) if later else own) + whole[:, None]
    among = {"scale": scale, "eps": eps, "ddof": ddof}
    return by_token(judged.experience, part_advantages(returns, judged.experience.groups, among="place", **among))


def least_of_parts(judged: Judged, temperature: float, **comparison: Any) -> Tensor:
    """[N, T] PURE's returns of the parts of completions, compared with all parts of the group."""
    own, whole = by_part(judged.experience, judged.scores, "minimum")
    returns = least_returns(own, temperature) + whole[:, None]
    return by_token(judged.experience, part_advantages(returns, judged.experience.groups, among="group", **comparison))


def least_returns(step_rewards: Tensor, temperature: float) -> Tensor:
    """[B, K] PURE's returns: the least reward from each step on, a soft minimum if `temperature` is above 0."""
    returns = minimum_returns(step_rewards)
    if not temperature:
        return returns
    soft = later_returns(minimum_weighted_rewards(step_rewards, temperature=temperature))
    return soft.masked_fill(returns.isnan(), torch.nan)


def by_part(experience: Completions, scores: RewardBatch, credit: str) -> tuple[Tensor, Tensor]:
    """Weighted sums of the rewards that score parts [N, K], and of the rewards that score whole completions [N].

    A part without any score is NaN. All parts of a completion that does not count are NaN. If a part lacks the score of
    one reward only, the mean over the parts in the same place of the group replaces the score. A reward of whole
    completions counts as the difference from its mean over the group; where it does not apply, it counts 0.

    Raises:
        ValueError: no reward scores parts.
    """
    assert experience.parts is not None
    weights = scores.weights.tolist()
    if not any(weight and name in scores.parts for name, weight in zip(scores.names, weights)):
        raise ValueError(
            f"credit {credit} takes scores of the parts of completions, and the rewards "
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
    """[B, width] ragged rows, filled with `value` after their ends."""
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def by_token(experience: Completions, advantages: Tensor) -> Tensor:
    """[N, T] the advantage of each token, which is the advantage [N, K] of its part; 0 after the end."""
    assert experience.parts is not None
    ids = experience.parts.ids
    width = max(len(row) for row in ids)
    mine = advantages.gather(1, padded(ids, width, 0))
    return torch.where(torch.arange(width) < experience.lengths[:, None], mine, 0.0).float()
