"""Attributes by which a part describes itself, and functions that read the attributes of a recipe's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .choice import Choice, choices

T = TypeVar("T", bound=Callable[..., Any])

TRAINED = {
    "steps": "the steps of a rollout that have noise",
    "states": "the states that a rollout visits, by penalties alone",
    "velocities": "the velocities at the states that a rollout visits",
    "gradients": "the states that a rollout visits, by the gradients of the rewards",
    "targets": "the states that a rollout visits, by targets along the gradients of the rewards",
    "choices": "choices among the next states of a group",
    "images": "finished images that are noised again",
    "recovered": "finished images that are noised again, by the gradients of the rewards",
}
"""What an objective of images may train: the values of its attribute `trains`, each with a description."""

OF_EDGES = ("steps", "states", "velocities", "gradients", "targets")
"""The values of `trains` for objectives that train recorded edges, by a loss or by penalties."""


OFFERED = {
    "tree": "the images that it makes of a prompt have states in common",
    "splits": "the images of a prompt separate at steps where every state splits",
    "branches": "a state may become several images",
    "noiseless": "none of its steps has noise",
    "given": "the data give its samples, and nothing is sampled",
    "neighbours": "it trains steps without noise",
    "divergence": "it tells how far the policy has moved since it last saw a prompt",
    "teachers": "it gives completions a context in which the policy teaches itself",
    "multipliers": "it finds the weights of rewards with `at_least`",
    "memory": "it learns from all samples of an iteration",
}
"""What a part may offer to other parts, each with a description of the part."""


def in_evaluations(form: T) -> T:
    """Mark a form of rollouts that evaluations use too, because a completion is not whole without it."""
    form.in_evaluations = True  # type: ignore[attr-defined]
    return form


def offers(*what: str, where: str | None = None) -> Callable[[T], T]:
    """Let a part say what it offers to other parts.

    Args:
        what: keys of `OFFERED`.
        where: name of an option. The part offers this only if the option is neither null nor false. None if the part
            always offers this.

    Raises:
        ValueError: if a key is not in `OFFERED`.
    """
    for one in what:
        if one not in OFFERED:
            raise ValueError(f"a part cannot offer {one!r}; it may offer {', '.join(OFFERED)}")

    def marked(part: T) -> T:
        before: tuple[tuple[str, str | None], ...] = getattr(part, "offered", ())
        part.offered = (*before, *((one, where) for one in what))  # type: ignore[attr-defined]
        return part

    return marked


def offered(recipe: Any, what: str) -> bool:
    """Whether any part of a recipe, with its options, offers `what`."""
    return any(offering(choice, what) for _, choice in choices(recipe))


def offering(choice: Choice, what: str) -> bool:
    """Whether a part, with its options, offers `what`."""
    offered: tuple[tuple[str, str | None], ...] = getattr(choice.target, "offered", ())
    wheres = [where for one, where in offered if one == what]
    return any(where is None or (choice.get(where) is not None and choice[where] is not False) for where in wheres)


def compares(part: T) -> T:
    """Let a part say that it compares with the reference: the base model, or the average that `reference` describes."""
    part.compares = True  # type: ignore[attr-defined]
    return part


def measured_distance(recipe: Any) -> str | None:
    """The metric that says how far the policy is from the reference: the first penalty that compares with it."""
    penalties: list[Choice] = getattr(recipe, "penalties", [])
    return next((one.short for one in penalties if getattr(one.target, "compares", False)), None)


def whole_groups(part: T) -> T:
    """Let a part say that it needs all samples of a prompt in one call."""
    part.whole_groups = True  # type: ignore[attr-defined]
    return part


def of_selection(part: T) -> T:
    """Let a part of whole groups say that it needs only the samples of a group that a selection keeps."""
    part.of_selection = True  # type: ignore[attr-defined]
    return part


def no_ratio(part: T) -> T:
    """Let a loss say that it has no importance ratio."""
    part.no_ratio = True  # type: ignore[attr-defined]
    return part


def part_scores(part: T) -> T:
    """Let a part say that it takes the scores of the parts of completions."""
    part.part_scores = True  # type: ignore[attr-defined]
    return part


def checks_prompts(check: Callable[..., None]) -> Callable[[T], T]:
    """Let a part say how the training prompts are checked for it before a run.

    Args:
        check: called with the chosen part and the prompts; raises ValueError if the part cannot use a prompt.
    """

    def marked(part: T) -> T:
        part.prompt_check = check  # type: ignore[attr-defined]
        return part

    return marked


def saying(recipe: Any, trait: str) -> list[Choice]:
    """The parts of a recipe whose code has the attribute `trait`."""
    return [choice for _, choice in choices(recipe) if getattr(choice.target, trait, False)]


def compares_all(part: Any) -> bool:
    """Whether a loss compares all samples of a group, so that it evaluates also the ones that are not trained."""
    return getattr(part, "whole_groups", False) and not getattr(part, "of_selection", False)


def trained(recipe: Any) -> str:
    """What the objective of an image recipe trains: a key of `TRAINED`."""
    found: str = getattr(recipe.objective.target, "trains", "steps")
    return found


def noises_again(recipe: Any) -> bool:
    """Whether the objective of an image recipe noises finished images again, and trains no step of a rollout."""
    return trained(recipe) in ("images", "recovered")


def differentiates(recipe: Any) -> bool:
    """Whether the objective of an image recipe follows the gradients of the rewards."""
    return trained(recipe) in ("gradients", "targets", "recovered")


def rewarded(recipe: Any) -> bool:
    """Whether rewards have a part in the loss of a recipe, and are not only reported."""
    if recipe.task != "text":
        return trained(recipe) != "states"
    return not all_taught(recipe) or bool(recipe.objective.get("both"))


def compares_rewards(recipe: Any) -> bool:
    """Whether the rewards of the samples of a prompt are compared with each other, so that one sample is too few."""
    return rewarded(recipe) and (recipe.task == "text" or trained(recipe) not in ("gradients", "recovered"))


def all_taught(recipe: Any) -> bool:
    """Whether every completion of a language model has a teacher, whatever its rewards are."""
    choosing = [choice for _, choice in choices(recipe) if offering(choice, "teachers")]
    if not choosing:
        return bool(recipe.model.teachers)
    return all(getattr(choice.target, "teaches_all", lambda _: False)(choice) for choice in choosing)


def keeps_base(recipe: Any) -> bool:
    """Whether a part, a teacher or evaluations need the base model, whose full weights must then be kept."""
    compares = recipe.reference is None and bool(saying(recipe, "compares"))
    teaches = any(teacher.is_base for teacher in recipe.model.teachers)
    return compares or teaches or recipe.evaluate.trained_share < 1
