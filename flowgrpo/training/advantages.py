"""From rewards to the advantages of what is trained, as a recipe says."""

from __future__ import annotations

from torch import Tensor

from ..configs.schema import AnyRecipe
from ..rewards.runner import RewardBatch
from .combining import combine
from .credit import credit_of, leaf_advantages
from .critic import Critic
from .memory import Memory
from .pooled import Pooled
from .readings import held_back, shaped
from .tasks import Collected


def combined(recipe: AnyRecipe, scores: RewardBatch, experience: Collected) -> RewardBatch:
    """The rewards as the recipe combines them."""
    return combine(scores, experience, recipe.rewards, recipe.advantage)


def node_advantages(
    recipe: AnyRecipe,
    memory: Memory,
    everyone: Pooled,
    scores: RewardBatch,
    experience: Collected,
    credit_model: Critic | None,
) -> Tensor:
    """[N] advantages of the nodes of this process; a step has that of the node it leads to.

    Args:
        recipe: with estimator, credit and bounds.
        memory: what estimators know of prompts; they learn from the samples, so call it once an iteration.
        everyone: the samples of all processes.
        scores: of this process's samples.
        experience: the rollout they are of.
        credit_model: the critic, if the recipe has one.
    """
    settings = recipe.advantage
    if settings.credit == "leaf" or memory.estimates:
        whole = combine(everyone.scores, everyone, recipe.rewards, settings)
        if memory.estimates:
            leaf = memory.advantages(whole, everyone)
        else:
            leaf = leaf_advantages(whole, everyone, settings, recipe.rewards)
        found = experience.node_advantages(shaped(leaf, everyone, settings.shaping)[everyone.mine])
    else:
        found = credit_of(settings)(experience, combined(recipe, scores, experience), settings, credit_model)
    found = held_back(found.nan_to_num(), everyone, experience, settings.uncertainty)
    return found if settings.clamp is None else found.clamp(-settings.clamp, settings.clamp)
