"""Recipes whose prompts get different numbers of samples, in rounds."""

from __future__ import annotations

from collections.abc import Sequence

from ..configs.schema import AnyRecipe
from ..rewards.base import Reward


def is_uneven(recipe: AnyRecipe) -> bool:
    """Whether prompts get different numbers of samples, in rounds."""
    return recipe.rollout.budget is not None or bool(recipe.data.templates)


def refuse_comparisons(rewards: Sequence[Reward]) -> None:
    """Raise ValueError for rewards that must see the samples of all rounds at once."""
    whole = [reward.name for reward in rewards if reward.whole_group]
    if whole:
        raise ValueError(
            f"with rollout.budget or data.templates, samples are scored round by round, and {', '.join(whole)} "
            "compares whole groups; leave one of them out"
        )
