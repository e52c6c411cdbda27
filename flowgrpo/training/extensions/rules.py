"""What an extension needs of a recipe: rules for `needs` that several extensions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...configs.reading_soundness import reward_place
from ...parts.choice import Choice
from ...parts.needs import Rule
from .extension import has_hook


def names_a_reward(recipe: Any, choice: Choice) -> list[str]:
    """A rule for `needs`: the option `reward` names one of the recipe's rewards."""
    return unknown_reward(recipe, f"extension {choice.short}", choice["reward"])


def of_reward(fits: Callable[[Any], bool], fault: str) -> Rule:
    """A rule about the reward that the option `reward` names.

    Args:
        fits: whether the entry of the reward in the recipe is as the extension needs it.
        fault: a clause with the extension as its subject, and what to write instead; {reward} is replaced.
    """

    def rule(recipe: Any, choice: Choice) -> list[str]:
        place = reward_place(recipe.rewards, choice["reward"])
        if place is None or fits(entry := recipe.rewards[place]):
            return []
        return [f"extension {choice.short} " + fault.replace("{reward}", entry.known_as)]

    return rule


def unknown_reward(recipe: Any, who: str, asked: str) -> list[str]:
    """The fault of a part, called `who`, that names a reward `asked`; empty if the recipe has the reward."""
    if reward_place(recipe.rewards, asked) is not None:
        return []
    labels = ", ".join(reward.label or reward.name for reward in recipe.rewards)
    return [f"{who} asks reward {asked!r}; the rewards are {labels}"]


def once(recipe: Any, choice: Choice) -> list[str]:
    """A rule for `needs`: a recipe has at most one entry of this name."""
    count = sum(other.name == choice.name for other in recipe.extensions)
    return [f"extensions has {choice.short} {count} times; write it once"] if count > 1 else []


def once_per_reward(recipe: Any, choice: Choice) -> list[str]:
    """A rule for `needs`: of the entries of this name, at most one names the same `reward`."""
    place = reward_place(recipe.rewards, choice["reward"])
    same = [other for other in recipe.extensions if other.name == choice.name
            and reward_place(recipe.rewards, other["reward"]) == place]  # fmt: skip
    if place is None or len(same) == 1:
        return []
    known = recipe.rewards[place].known_as
    return [f"extensions has {choice.short} {len(same)} times for reward {known}; write it once"]


def draws_last(why: str) -> Rule:
    """A need that no later extension draws prompts; `why` is a clause with the extension as its subject."""

    def rule(recipe: Any, choice: Choice) -> list[str]:
        place = [one is choice for one in recipe.extensions].index(True)
        return [
            f"extension {choice.short} {why}, and {other.short} draws prompts after it; write it before, or put "
            f"{choice.short} last"
            for other in recipe.extensions[place + 1 :]
            if has_hook(other, "prompts_drawn")
        ]

    return rule


def without(why: str, **others: str) -> Rule:
    """A need that a recipe lacks some extensions.

    Args:
        why: a clause with the extension as its subject.
        others: name of each of the other extensions -> a clause with it as its subject.
    """

    def rule(recipe: Any, choice: Choice) -> list[str]:
        return [
            f"extension {choice.short} {why}, and extension {other.short} {others[other.name]}; leave one of them out"
            for other in recipe.extensions
            if other.name in others
        ]

    return rule
