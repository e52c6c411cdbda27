"""What a recipe reads of a reward beside its value: signals of samples, and the answers that it found in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..configs.reading_soundness import reward_place
from ..configs.schema import AnyRecipe
from ..configs.sections import ShapingConfig, UncertaintyConfig
from ..core.outcomes import semantic_entropy_weights
from ..core.shaping import bounded_shaping
from ..rewards.runner import RewardBatch

if TYPE_CHECKING:
    from .pooled import Pooled
    from .tasks import Collected


def as_reported(recipe: AnyRecipe, names: Sequence[str]) -> AnyRecipe:
    """A recipe in which keys that refer to a reward have the name under which its scores are reported.

    Args:
        recipe: where a reward may be meant by its label, or by its name as the recipe has it.
        names: of its rewards.
    """

    def named(section: Any) -> Any:
        if section is None:
            return None
        place = reward_place(recipe.rewards, section.reward)
        assert place is not None
        return section.model_copy(update={"reward": names[place]})

    advantage, data, curriculum = recipe.advantage, recipe.data, recipe.data.curriculum
    rewards = [reward.model_copy(update={"gate": named(reward.gate)}) for reward in recipe.rewards]
    referring = {key: named(getattr(advantage, key)) for key in ("stratum", "shaping", "uncertainty")}
    if curriculum is not None:
        curriculum = curriculum.model_copy(update={"diversity": named(curriculum.diversity)})
        data = data.model_copy(update={"curriculum": curriculum})
    return recipe.model_copy(
        update={"rewards": rewards, "advantage": advantage.model_copy(update=referring), "data": data}
    )


def signal_values(scores: RewardBatch, reward: str, sub_score: str | None, key: str) -> list[float]:
    """[L] what a reward, or one of its sub-scores, says of samples; NaN where it says nothing.

    Args:
        scores: of L samples, as the rewards gave them.
        reward: label.
        sub_score: name; None for the reward itself.
        key: of the recipe, for the message.

    Raises:
        ValueError: the reward has no such sub-score.
    """
    if sub_score is None:
        return scores.values[:, scores.names.index(reward)].tolist()
    known = scores.sub_scores.get(reward, {})
    if sub_score not in known:
        raise ValueError(
            f"{key} asks reward {reward} for the sub-score {sub_score!r}, which it does not give; it gives "
            f"{', '.join(known) or 'none, so leave `sub_score` out to take the reward itself'}"
        )
    return known[sub_score]


def readers(recipe: AnyRecipe) -> dict[str, str]:
    """Label of a reward whose answers the recipe needs -> the key that asks for them."""
    curriculum, uncertainty = recipe.data.curriculum, recipe.advantage.uncertainty
    found = {} if uncertainty is None else {uncertainty.reward: "advantage.uncertainty"}
    if curriculum is not None and curriculum.diversity is not None:
        found.setdefault(curriculum.diversity.reward, "data.curriculum.diversity")
    return found


def answers_of(scores: RewardBatch, reward: str, key: str) -> list[str | None]:
    """[L] what a reward read in samples.

    Args:
        scores: of L samples, as the rewards gave them.
        reward: label.
        key: of the recipe, for the message.

    Raises:
        ValueError: the reward gives no answers.
    """
    if reward not in scores.answers:
        raise ValueError(
            f"{key} asks reward {reward} for answers, which it does not give; name one that does "
            f"({', '.join(scores.answers) or 'none of this recipe'}), or have it return `Scores(values, answers=...)`"
        )
    return scores.answers[reward]


def shaping_values(scores: RewardBatch, settings: ShapingConfig) -> list[float]:
    """[L] the signal by which advantages are shaped; NaN where there is none. Raises as `signal_values`."""
    return signal_values(scores, settings.reward, settings.sub_score, "advantage.shaping")


def shaped(advantages: Tensor, pooled: Pooled, settings: ShapingConfig | None) -> Tensor:
    """[L] advantages of samples with the signal of the settings added, within its bound."""
    if settings is None:
        return advantages
    assert pooled.signal is not None
    return bounded_shaping(advantages, pooled.signal, pooled.groups, strength=settings.strength, bound=settings.bound)


def certainty(pooled: Pooled, settings: UncertaintyConfig) -> Tensor:
    """[L] factors of advantages in [0, 1], small where the answers of a group disagree.

    Samples that are no results have no say, and neither have those in which nothing was read.
    """
    answers = pooled.scores.answers[settings.reward]
    read = torch.tensor([answer is not None for answer in answers])
    names: dict[str | None, int] = {}
    ids = [names.setdefault(answer, len(names)) for answer in answers]
    return semantic_entropy_weights(
        ids, pooled.groups, alpha=settings.alpha, form=settings.form, valid=read & pooled.outcomes
    )


def reading_record(pooled: Pooled, settings: UncertaintyConfig | None) -> dict[str, float]:
    """What the metrics say of it."""
    return {} if settings is None else {"certainty": float(certainty(pooled, settings).mean())}


def held_back(advantages: Tensor, pooled: Pooled, experience: Collected, settings: UncertaintyConfig | None) -> Tensor:
    """Advantages [N] or [N, T] of this process's nodes, times the certainty of the samples that each leads to."""
    if settings is None:
        return advantages
    factor = experience.node_advantages(certainty(pooled, settings)[pooled.mine]).nan_to_num()
    return advantages * (factor if advantages.ndim == 1 else factor[:, None])
