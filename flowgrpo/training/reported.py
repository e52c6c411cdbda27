"""What a recipe reads from a reward besides its value: the strata of samples, and the answers in samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..configs.reading_soundness import reward_place
from ..configs.schema import AnyRecipe
from ..rewards.runner import RewardBatch
from .credit.strata import Stratum


def as_reported(recipe: AnyRecipe, names: Sequence[str]) -> AnyRecipe:
    """The recipe, with every reference to a reward replaced by the name under which its scores are reported.

    Args:
        recipe: it refers to a reward by its label, or by its name in the recipe.
        names: the reported names of its rewards.
    """

    def named(section: Any) -> Any:
        if section is None:
            return None
        place = reward_place(recipe.rewards, section.reward)
        assert place is not None
        return section.model_copy(update={"reward": names[place]})

    rewards = [reward.model_copy(update={"gate": named(reward.gate)}) for reward in recipe.rewards]
    advantage = recipe.advantage
    if advantage is not None:
        strata = {name: named(value) for name, value in advantage.options.items() if isinstance(value, Stratum)}
        advantage = replace(advantage, options={**advantage.options, **strata})
    return recipe.model_copy(update={"rewards": rewards, "advantage": advantage})


def answers_of(scores: RewardBatch, reward: str, key: str) -> list[str | None]:
    """[L] the answers that a reward read in samples.

    Args:
        scores: of L samples, as the rewards gave them.
        reward: label.
        key: the key of the recipe that names the reward, for the message.

    Raises:
        ValueError: the reward gives no answers.
    """
    if reward not in scores.answers:
        raise ValueError(
            f"{key} asks reward {reward} for answers, which it does not give; name one that does "
            f"({', '.join(scores.answers) or 'none of this recipe'}), or have it return `Scores(values, answers=...)`"
        )
    return scores.answers[reward]
