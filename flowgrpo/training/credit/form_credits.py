"""Advantages that read what a form of the rollout tells about each completion: where it was cut, or what it answers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ...core.advantages import group_advantages
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
    experience, totals = judged.experience, judged.rewards()
    origins, groups, count = experience.origins(), experience.groups, experience.origins()[0]["budgets"]
    known: dict[tuple[int, int], int] = {}
    paths = [known.setdefault((g, one["number"]), len(known)) for g, one in zip(groups.tolist(), origins)]
    answers = defaultdict[tuple[int, int], list[int]](list)
    for row, (path, origin) in enumerate(zip(paths, origins)):
        answers[path, origin["budget"]].append(row)
    means = torch.zeros(len(known), count)
    for (path, budget), rows in sorted(answers.items()):
        # Thoughts that have ended have their last answers at all later budgets.
        means[path, budget:] = totals[rows].nanmean()
    weights = torch.ones(count) if prior == "uniform" else torch.arange(1.0, count + 1)
    thoughts = budget_relative_advantages(means, [group for group, _ in known], weights)
    budgets = torch.tensor([one["budget"] for one in origins])
    alone = torch.tensor([len(answers[path, one["budget"]]) == 1 for path, one in zip(paths, origins)])
    among = torch.where(alone, groups, groups.max() + 1 + torch.tensor(paths))
    own = group_advantages(totals, among * count + budgets, scale="none")
    values, inside = list[list[float]](), list[list[int]]()
    for row, (path, origin, length) in enumerate(zip(paths, origins, experience.lengths.tolist())):
        pair, border = [float(thoughts[path, origin["budget"]]), float(own[row])], origin["thought"]
        inside.append([border] if 0 < border < length else [])
        values.append(pair if inside[-1] else [pair[0] if border else pair[1]])
    return by_segment(values, inside, experience.lengths)


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
    experience, origins = judged.experience, judged.experience.origins()
    budgets = torch.tensor([one["budget"] for one in origins])
    written = experience.lengths - torch.tensor([one["opening"] for one in origins])
    longest = max(one["longest"] for one in origins)
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
