"""Selections choose the samples that enter the gradient. All samples enter the statistics.

A selection is a function `(rewards [L], groups [L], *, ...) -> [L] bool`. Rewards are weighted sums, NaN where no
reward applies. A group is all samples of a prompt. With `among: split`, a group is the images below a tree's last
split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core import subsets
from ...core.advantages import as_precise, group_index, sum_by_group
from ...core.selection import select
from ...parts.choice import Choice, value_at
from ...parts.needs import needs
from ...parts.ranges import Count
from .combining import total_reward
from .conditions import PLAN, plan_offers

if TYPE_CHECKING:
    from ...rewards.runner import RewardBatch


def extremes(rewards: Tensor, groups: Tensor, *, keep: Count) -> Tensor:
    """The best and the worst samples in equal parts (DanceGRPO, arXiv 2505.07818).

    Args:
        rewards: [L].
        groups: [L].
        keep: samples kept of each group. If the number is odd, one more of the best samples is kept.
    """
    return select(rewards, groups, keep, choice="extremes")


def best(rewards: Tensor, groups: Tensor, *, keep: Count) -> Tensor:
    """The best samples; with `among: split` this is BranchGRPO's width pruning (arXiv 2509.06040).

    Args:
        rewards: [L].
        groups: [L].
        keep: samples kept of each group.
    """
    return select(rewards, groups, keep, choice="best")


def widest(rewards: Tensor, groups: Tensor, *, keep: Count) -> Tensor:
    """The subset of samples with the greatest variance of rewards (PODS, arXiv 2504.13818; D³S).

    Args:
        rewards: [L].
        groups: [L].
        keep: samples kept of each group.
    """
    return subsets.widest(rewards, groups, keep)


def balanced(rewards: Tensor, groups: Tensor, *, keep: Count, success: float = 0.5) -> Tensor:
    """Successes and failures in equal parts, as far as there are enough of both (Reinforce-Ada, arXiv 2510.04996).

    Args:
        rewards: [L].
        groups: [L].
        keep: samples kept of each group.
        success: the least reward of a success.
    """
    return subsets.balanced(rewards, groups, keep, success=success)


def _groups_of_two(recipe: Any, choice: Choice) -> list[str]:
    """A need of groups whose rewards can differ. The images of a tree are a group, whatever its number of roots is."""
    if recipe.rollout.group >= 2 or plan_offers(recipe, "tree") or plan_offers(recipe, "branches"):
        return []
    return [
        f"select {choice.short} leaves out groups of equal rewards, and rollout.group is {recipe.rollout.group}, so it "
        "leaves out every sample; use 2 or more, or leave it out of select"
    ]


@needs(_groups_of_two)
def varied(rewards: Tensor, groups: Tensor) -> Tensor:
    """Groups whose rewards differ (DAPO). Groups of equal rewards do not enter the count that divides the loss."""
    return ~subsets.degenerate_rows(rewards, groups)


SELECTIONS: dict[str, Callable[..., Tensor]] = {
    "extremes": extremes,
    "best": best,
    "widest": widest,
    "balanced": balanced,
    "varied": varied,
}
"""`selection(rewards [L], groups [L], *, ...) -> [L]` bool."""


def _whole_images(recipe: Any, choice: Choice) -> list[str]:
    if len(value_at(recipe, f"{PLAN}.completions") or ()) < 2:
        return []
    return ["select chooses images, and a branch with several completions has several images; use one completion"]


def _below_a_split(recipe: Any, choice: Choice) -> list[str]:
    if choice["among"] != "split" or plan_offers(recipe, "splits"):
        return []
    mend = "use among group" if recipe.task == "text" else "use sampler.plan branch, or among group"
    return [f"select with among split needs a tree that splits; {mend}"]


def _of_samples(recipe: Any, choice: Choice) -> list[str]:
    if not choice["centre"] or (recipe.credit.name == "leaf" and recipe.advantage is not None):
        return []
    return [
        "select with centre shifts the advantages of samples; use credit leaf and an advantage, or leave centre out"
    ]


NEEDS = (_whole_images, _below_a_split, _of_samples)
"""What every selection needs from a recipe."""


def chosen_samples(
    experience: Any, scores: RewardBatch, selections: Sequence[tuple[str, Callable[..., Tensor]]]
) -> Tensor:
    """[L] bool: samples that enter the gradient.

    Args:
        experience: the rollout of this process.
        scores: of its samples, combined.
        selections: pairs of `among` and a selection with its options bound.

    Raises:
        ValueError: a selection does not return a bool for each sample.
    """
    ranked = total_reward(scores, experience)
    mine = torch.ones(len(ranked), dtype=torch.bool)
    for among, selection in selections:
        chosen = selection(ranked, experience.siblings(among))
        if not isinstance(chosen, Tensor) or chosen.shape != mine.shape or chosen.dtype != torch.bool:
            tensor = isinstance(chosen, Tensor)
            gave = f"{chosen.dtype} of shape {tuple(chosen.shape)}" if tensor else type(chosen).__name__
            raise ValueError(
                f"a selection has to give a bool for each sample, a tensor of shape {tuple(mine.shape)}; it gave {gave}"
            )
        mine = mine & chosen
    return mine


def kept_nodes(experience: Any, scores: RewardBatch, selections: Sequence[tuple[str, Callable[..., Tensor]]]) -> Tensor:
    """[N] bool: nodes whose edges are trained; arguments and errors are as for `chosen_samples`."""
    kept: Tensor = experience.kept(chosen_samples(experience, scores, selections))
    return kept


def centred(advantages: Tensor, chosen: Tensor, groups: Tensor) -> Tensor:
    """[L] advantages, shifted by the mean over the chosen samples of the group.

    A selection changes the mean of a group's trained advantages. A loss whose gradient does not vanish in the mean, as
    the loss of DiffusionNFT, then moves towards all samples or away from all of them.

    Args:
        advantages: [L], NaN where a sample has none.
        chosen: [L] bool.
        groups: [L] ids. A group without a chosen sample stays as it is.
    """
    counted = chosen & ~advantages.isnan()
    index, count = group_index(groups, len(advantages), advantages.device)
    values = torch.where(counted, as_precise(advantages), 0.0)
    sums, sizes = (sum_by_group(one[:, None], index, count)[:, 0] for one in (values, counted.to(values)))
    return (advantages - (sums / sizes.clamp(min=1))[index]).to(advantages)
