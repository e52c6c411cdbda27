"""What the code of a part says of itself in attributes, and what a recipe asks of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .choice import Choice, choices

T = TypeVar("T", bound=Callable[..., Any])

TRAINED = {
    "steps": "the steps of a rollout that have noise",
    "choices": "choices among the next states of a group",
    "images": "finished images that are noised again",
}
"""What an objective of images may train: the value of its attribute `trains`, and in words."""


def compares(part: T) -> T:
    """Let a part say that it compares with the reference: the base model, or what `reference` makes of it."""
    part.compares = True  # type: ignore[attr-defined]
    return part


def whole_groups(part: T) -> T:
    """Let a part say that it needs all samples of a prompt in one call."""
    part.whole_groups = True  # type: ignore[attr-defined]
    return part


def saying(recipe: Any, trait: str) -> list[Choice]:
    """The parts of a recipe whose code says `trait` of itself."""
    return [choice for _, choice in choices(recipe) if getattr(choice.target, trait, False)]


def trained(recipe: Any) -> str:
    """What the objective of a recipe of images trains: a key of `TRAINED`."""
    found: str = getattr(recipe.objective.target, "trains", "steps")
    return found


def keeps_base(recipe: Any) -> bool:
    """Whether a part compares with the base model, whose full weights must then be kept."""
    return recipe.reference is None and bool(saying(recipe, "compares"))
