"""Advantages that read what a form of the rollout tells about each completion: where it was cut, or what it answers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ...core.advantages import group_advantages
from ...core.grouped import cells
from ...core.segment_credit import by_segment, gain_advantages, segment_advantages
from ...core.token_budgets import (
    budget_relative_advantages,
    budgeted_rewards,
    decayed_rewards,
    nested_advantages,
)
from ...parts.needs import Need, needs
from ...parts.ranges import Fraction, NotNegative, Share
from .conditions import compares_itself, group_of_two, of_tokens, undivided
from .scales import Ddof, ScaleWithin
from .token_credits import padded

if TYPE_CHECKING:
    from .credits import Judged


def _of_form(name: str, why: str) -> tuple[Need, Need]:
    """Needs of a credit that reads what one form tells."""
    return Need("task", ("text",), why), Need("rollout.form", (name,), why, task="text")


def _told(judged: Judged, name: str) -> Tensor:
    """[N] a number that the form tells about each completion."""
    return torch.tensor([origin[name] for origin in judged.experience.origins()])


@needs(*_of_form("segments", "takes the values of the ends of segments"), compares_itself, group_of_two, of_tokens)
def segments(judged: Judged, *, below: Fraction = 1.0) -> Tensor:
    """What each segment of a completion gained, by its continuations (SPO, 2505.23564; VinePPO, 2410.01679).

    The value of the prompt is the mean reward of the completions of the group.

    Args:
        judged: of completions.
        below: only tokens of a probability of at most this have an advantage (SPO's probability mask); 1 for all.
    """
    experience, totals = judged.experience, judged.rewards(previews=True)
    origins, groups = experience.origins(), experience.groups.tolist()
    continued = defaultdict[tuple[int, int, int], list[float]](list)
    for group, origin, total in zip(groups, origins, totals.tolist()):
        if "token" in origin:
            continued[group, origin["number"], origin["token"]].append(total)
    value = {place: float(torch.tensor(found).nanmean()) for place, found in continued.items()}
    cuts = [one.get("cuts", []) for one in origins]
    found = segment_advantages(
        totals.tolist(),
        (totals - group_advantages(judged.rewards(), groups, scale="none")).tolist(),
        cuts,
        [[value[group, one["number"], token] for token in own] for group, one, own in zip(groups, origins, cuts)],
        experience.lengths,
    )
    unlikely = [[p <= math.log(below) for p in own] for own in experience.sampled.log_probs]
    return torch.where(padded(unlikely, found.shape[1], False), found, 0.0)


@needs(*_of_form("exits", "takes the exits of a completion"), compares_itself, undivided)
def exits(
    judged: Judged,
    *,
    decay: Share = 0.5,
    success: float = 0.5,
    scale: ScaleWithin = "none",
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """A correct exit gets less than an earlier correct one; the exits of a prompt are compared (S-GRPO, 2505.07686).

    Args:
        judged: of completions.
        decay: the k-th correct exit, from 0, has the reward decay^k.
        success: the least reward of a correct exit. A wrong exit has the reward 0.
        scale: what advantages are divided by: the standard deviation of the group, or nothing.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    experience = judged.experience
    places = [origin["exit"] for origin in experience.origins()]
    rewards = decayed_rewards(judged.rewards(), experience.groups.tolist(), places, decay=decay, success=success)
    return group_advantages(rewards, experience.groups, scale=scale, eps=eps, ddof=ddof)


@needs(*_of_form("anytime", "takes the answers at several budgets"), compares_itself, group_of_two, of_tokens)
def anytime(judged: Judged, *, prior: Literal["uniform", "linear"] = "uniform") -> Tensor:
    """Thoughts are credited with the rewards at all later budgets (BRPO of AnytimeReasoner, arXiv 2505.13438).

    An answer is compared with the other answers to the same thoughts. If there is only one, it is compared with the
    answers at the same budget of the other completions of the prompt.

    Args:
        judged: of completions.
        prior: weights of the budgets: all alike, or in proportion to the budget.
    """
    groups, lengths, totals = judged.experience.groups, judged.experience.lengths, judged.rewards()
    budgets, width = _told(judged, "budget"), int(_told(judged, "budgets")[0])
    paths, count = cells(groups, _told(judged, "number"), "number")
    answered = sorted(set(zip(paths.tolist(), budgets.tolist())))
    means = torch.zeros(count, width)
    for path, budget in answered:
        # Thoughts that have ended have their last answers at all later budgets.
        means[path, budget:] = totals[(paths == path) & (budgets == budget)].nanmean()
    weights = torch.ones(width) if prior == "uniform" else torch.arange(1.0, width + 1)
    group_of_path = groups.new_zeros(count).scatter(0, paths, groups)
    thoughts = budget_relative_advantages(means, group_of_path, weights)[paths, budgets]
    # Either all thoughts have one answer, or all have several. A completion that ended in its thoughts has no answer.
    peers, _ = cells(paths if len(answered) < len(totals) else groups, budgets, "budget")
    answers = group_advantages(totals, peers, scale="none")
    token = torch.arange(int(lengths.max()))
    found = torch.where(token < _told(judged, "thought")[:, None], thoughts[:, None], answers[:, None])
    return torch.where(token < lengths[:, None], found, 0.0)


@needs(*_of_form("subgroups", "compares the budgets of a group"), compares_itself, group_of_two, undivided)
def subgroups(
    judged: Judged,
    *,
    price: NotNegative = 0.25,
    between: NotNegative = 1.0,
    scale: ScaleWithin = "group",
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """Completions are compared within the subgroup of their budget, and the subgroups within the group (2507.15844).

    Rewards depend on length and budget, see `core.token_budgets.budgeted_rewards`.

    Args:
        judged: of completions.
        price: of a distance of generation.max_tokens from the budget.
        between: weight of the comparison of subgroups.
        scale: what advantages are divided by: the standard deviations of subgroup and group, or nothing.
        eps: added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    experience, budgets = judged.experience, _told(judged, "budget")
    written, longest = experience.lengths - _told(judged, "opening"), int(_told(judged, "longest")[0])
    rewards = budgeted_rewards(judged.rewards(), written, budgets, longest, price=price)
    return nested_advantages(rewards, experience.groups, budgets, between=between, scale=scale, eps=eps, ddof=ddof)


@needs(*_of_form("greedy", "compares with the completion of the likeliest tokens"), compares_itself)
def greedy(judged: Judged) -> Tensor:
    """The reward minus the reward of the greedy completion of the prompt (ReMax, arXiv 2310.10505).

    Args:
        judged: of completions.
    """
    experience, totals = judged.experience, judged.rewards(previews=True)
    baseline = {
        group: total
        for group, total, origin in zip(experience.groups.tolist(), totals.tolist(), experience.origins())
        if "greedy" in origin
    }
    return judged.rewards() - torch.tensor([baseline[group] for group in experience.groups.tolist()])


@needs(*_of_form("gains", "takes the gains of segments"), compares_itself, group_of_two, of_tokens, undivided)
def gains(
    judged: Judged,
    *,
    gamma: Fraction = 1.0,
    scale: ScaleWithin = "group",
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """Each segment is rewarded with its gain, and the last with the outcome (IGPO, arXiv 2510.14967).

    Args:
        judged: of completions.
        gamma: discount per segment.
        scale: what rewards are divided by: the standard deviation of all segments of the group, or nothing.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    experience, origins = judged.experience, judged.experience.origins()
    steps = [[*one["gains"], total] for one, total in zip(origins, judged.rewards().tolist())]
    rows = padded(steps, max(map(len, steps)), torch.nan)
    found = gain_advantages(rows, experience.groups, gamma=gamma, scale=scale, eps=eps, ddof=ddof)
    own = [values[: len(one)] for values, one in zip(found.tolist(), steps)]
    return by_segment(own, [one["cuts"] for one in origins], experience.lengths)


FORM_CREDITS: dict[str, Callable[..., Tensor]] = {
    "segments": segments,
    "exits": exits,
    "anytime": anytime,
    "subgroups": subgroups,
    "greedy": greedy,
    "gains": gains,
}
"""The credits of this file, by name."""
