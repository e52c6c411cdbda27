"""What is unsound in the rewards of a recipe: weights, gates, corrections and constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .reading_soundness import reward_place

if TYPE_CHECKING:
    from .schema import AnyRecipe
    from .sections import RewardConfig


def reward_faults(recipe: AnyRecipe) -> list[str]:
    """Of all rewards of a recipe."""
    labels = [reward.label or reward.name for reward in recipe.rewards]
    named = dict(zip(labels, recipe.rewards))
    faults = [fault for label in labels for fault in _own_faults(recipe, label, named)]
    counted = {label: reward for label, reward in named.items() if reward.weight != 0}
    if not counted:
        faults.append(
            f"every reward has weight 0 ({', '.join(labels)}), by which it is only recorded, so nothing is optimised; "
            "give one a weight above 0, or below 0 where less of it is better"
        )
    faults += [*_apart_faults(recipe, counted), *_constraint_faults(recipe, counted)]
    return faults


def _own_faults(recipe: AnyRecipe, label: str, named: dict[str, RewardConfig]) -> list[str]:
    """Of one reward by itself."""
    reward, faults = named[label], list[str]()
    if reward.gate is not None:
        asked = reward_place(recipe.rewards, reward.gate.reward)
        if asked is None or recipe.rewards[asked] is reward:
            others = ", ".join(other for other in named if other != label) or "none, so add one"
            faults.append(f"the gate of reward {label} asks {reward.gate.reward!r}; the other rewards are {others}")
    if reward.unlikely is not None and recipe.task == "images":
        faults.append(
            f"reward {label} has `unlikely`: the density of an image's Gaussian steps tells how large their noise "
            "was, not how likely the policy finds the image; leave it out"
        )
    if reward.noise is not None and reward.noise.false_positive + reward.noise.false_negative >= 1:
        faults.append(f"the rates in noise of reward {label} add up to 1 or more: such a verdict tells nothing")
    if reward.at_least is not None and reward.weight == 0:
        faults.append(
            f"reward {label} has weight 0, by which it is only recorded, and `at_least`, which makes a constraint of "
            "it and finds its weight; leave one of them out"
        )
    return faults


def _apart_faults(recipe: AnyRecipe, counted: dict[str, RewardConfig]) -> list[str]:
    """Of rewards that are compared among the successes of another, by label."""
    faults = list[str]()
    apart = {label: reward for label, reward in counted.items() if reward.gate is not None and reward.gate.apart}
    for label, reward in apart.items():
        if reward.weight < 0:
            faults.append(
                f"reward {label} is compared among successes (gate.apart) with weight {reward.weight:g}; use 0 or "
                "more, and turn the sign of the reward where less is better"
            )
        if reward.gate is not None and reward.gate.share is not None:
            faults.append(
                f"the gate of reward {label} has `share`, which opens it for whole groups, and `apart`, which is of "
                "single samples; leave one out"
            )
    if len(apart) > 1:
        faults.append(f"gate.apart is for one reward, and {', '.join(apart)} have it; leave it out of all but one")
    elif apart and len(counted) == 1:
        faults.append(
            f"gate.apart adds reward {', '.join(apart)} to the advantages of the others, and those all have weight 0; "
            "give one of them another weight"
        )
    constrained = any(reward.at_least is not None for reward in counted.values())
    if apart and (not _plain(recipe) or constrained):
        faults.append(
            "a reward with gate.apart has a scale of its own: use combine sum, credit leaf, advantage group with "
            "baseline mean and scale group, and no reward with `at_least`"
        )
    return faults


def _constraint_faults(recipe: AnyRecipe, counted: dict[str, RewardConfig]) -> list[str]:
    """Of rewards with `at_least`."""
    constrained = [label for label, reward in counted.items() if reward.at_least is not None]
    if not constrained or "multipliers" in [choice.name for choice in recipe.extensions]:
        return []
    return [
        f"reward {', '.join(constrained)} has `at_least`, and nothing finds its weight; add {{name: multipliers}} to "
        "extensions"
    ]


def _plain(recipe: AnyRecipe) -> bool:
    """Whether samples are compared with the mean of their group, by the weighted sum of the rewards."""
    chosen = recipe.advantage
    if chosen is None or (recipe.combine.name, recipe.credit.name, chosen.name) != ("sum", "leaf", "group"):
        return False
    return bool(chosen["baseline"] == "mean" and chosen["scale"] == "group")
