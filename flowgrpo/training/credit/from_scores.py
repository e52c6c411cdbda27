"""From the scores of all samples to the advantages of the steps or tokens that are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...configs.reward_sections import RewardConfig
from ...configs.schema import AnyRecipe
from ...core.advantages import TRANSFORMS, group_advantages
from ...core.bounded_terms import positive_only_advantages
from ...parts.choice import Choice
from ...rewards.runner import RewardBatch
from ..extensions.extension import Comparison, Extensions
from ..folder.checkpoint import Stateful
from ..images.critic import Critic
from .combining import combine, counted_rewards, total_reward
from .comparing import ADVANTAGES, compare, refuse_not_finite
from .credits import Judged
from .pooling import Batch, Pooled
from .selecting import centred, chosen_samples, kept_nodes
from .strata import stratum_of


@runtime_checkable
class Recording(Protocol):
    """A part that adds to the metrics."""

    def record(self) -> dict[str, float]:
        """Name -> value, since the last call."""


class Credit:
    """Turns rewards into advantages: it combines rewards, compares samples, and credits steps or tokens.

    Args:
        recipe: chooses the parts.

    Attributes:
        stratum: which samples are alike, where the advantage asks for strata.

    Raises:
        ValueError: a part refuses a combination of options.
    """

    def __init__(self, recipe: AnyRecipe) -> None:
        self._recipe = recipe
        self._combination = recipe.combine.make()
        self._advantage = None if recipe.advantage is None else recipe.advantage.make()
        self._credit = recipe.credit.make()
        self._selections = [(str(chosen["among"]), chosen.make()) for chosen in recipe.select]
        self._centre = {str(chosen["among"]) for chosen in recipe.select if chosen["centre"]}
        self._scale = {} if recipe.advantage is None else _scale_of(recipe.advantage)
        self.stratum = stratum_of(recipe.advantage)

    def advantages(
        self, everyone: Pooled, batch: Batch, critic: Critic | None = None, extensions: Extensions | None = None
    ) -> Tensor:
        """[N] or [N, T] advantages of the nodes of this process; a step has the advantage of the node it leads to.

        Parts that remember learn from the samples. So call it once per iteration, on every process.

        Args:
            everyone: the samples of all processes.
            batch: the samples of this process.
            critic: if the recipe has one.
            extensions: of the run; they may change the advantages, and learn from the samples.
        """
        recipe, experience, mine = self._recipe, batch.experience, None
        extensions = extensions or Extensions()
        if self._advantage is not None:
            mine = self._compared(everyone, self._advantage, extensions)[everyone.mine]
            for among in sorted(self._centre):
                chosen = chosen_samples(experience, self.combined(batch), self._selections)
                mine = centred(mine, chosen, experience.siblings(among))
        judged = Judged(experience, self.combined(batch), mine, critic, recipe.task)
        found: Tensor = self._credit(judged)
        nodes = len(experience.kept(torch.ones(len(batch.scores.values), dtype=torch.bool)))
        if found.ndim not in (1, 2) or len(found) != nodes:
            raise ValueError(
                f"credit {recipe.credit.short} has to give an advantage for each of {nodes} nodes; it gave a tensor of "
                f"shape {tuple(found.shape)}"
            )
        # A credit gives NaN to a step that no score reaches. It reaches some, where samples have scores.
        lost = bool(found.isnan().all()) and not bool(judged.scores.values.isnan().any())
        refuse_not_finite(f"credit {recipe.credit.short}", found, ~found.isnan() | lost)
        if recipe.transform is not None:
            # A transform may make something of 0, which is the advantage where no reward applies.
            without = experience.node_advantages(judged.rewards()).isnan()
            found = TRANSFORMS[recipe.transform](found)
            found[without.to(found.device)] = 0.0
        found = extensions.advantages_made(found.nan_to_num(), everyone, batch)
        return found if recipe.clamp is None else found.clamp(-recipe.clamp, recipe.clamp)

    def combined(self, batch: Batch) -> RewardBatch:
        """The rewards of this process's samples, combined as the recipe says."""
        return combine(batch.scores, batch.experience, self._recipe.rewards, self._combination)

    def kept(self, batch: Batch) -> Tensor | None:
        """[N] bool: nodes of this process that are trained; None if all are."""
        if not self._selections:
            return None
        return kept_nodes(batch.experience, self.combined(batch), self._selections)

    def parts(self) -> dict[str, Stateful]:
        """The parts that a checkpoint keeps, by file name."""
        made = {"combination": self._combination, "advantage": self._advantage, "credit": self._credit}
        made |= {f"selection-{k}": selection for k, (_, selection) in enumerate(self._selections)}
        return {name: part for name, part in made.items() if isinstance(part, Stateful)}

    def record(self) -> dict[str, float]:
        """What the advantage adds to the metrics; nothing if it has no method `record`."""
        return self._advantage.record() if isinstance(self._advantage, Recording) else {}

    def _compared(self, everyone: Pooled, advantage: Callable[..., Tensor], extensions: Extensions) -> Tensor:
        """[L] advantages of the samples of all processes."""
        rewards = self._recipe.rewards
        whole = combine(everyone.scores, everyone, rewards, self._combination)
        if any(reward.gate is not None and reward.gate.apart for reward in counted_rewards(rewards)):
            found = compare_apart(whole, everyone, rewards, eps=self._scale["eps"], ddof=self._scale["ddof"])
        else:
            found = compare(advantage, aims(whole, rewards), everyone)
        again = partial(group_advantages, groups=everyone.groups, **self._scale)
        return extensions.samples_compared(found, Comparison(everyone, whole, again))


def _scale_of(chosen: Choice) -> dict[str, Any]:
    """The options of an advantage of the package that say what it divides by; empty for a user's own advantage."""
    names = ("eps", "ddof", "scale") if chosen.name in ADVANTAGES else ()
    return {name: chosen[name] for name in names if name in chosen.options}


def aims(scores: RewardBatch, rewards: Sequence[RewardConfig]) -> RewardBatch:
    """The combined rewards without the rewards that are constraints.

    Args:
        scores: [L, K], of all rewards that count, or the one column into which they were combined.
        rewards: of the recipe.
    """
    counted = counted_rewards(rewards)
    wanted = [k for k, reward in enumerate(counted) if reward.at_least is None]
    if len(wanted) == len(counted):
        return scores
    names = tuple(scores.names[k] for k in wanted)
    return replace(scores, values=scores.values[:, wanted], names=names, weights=scores.weights[wanted])


def compare_apart(
    scores: RewardBatch, samples: Any, rewards: Sequence[RewardConfig], *, eps: float, ddof: int
) -> Tensor:
    """[L] DRPO's decoupling: one reward is compared among the successes of another, the others among all samples."""
    columns = counted_rewards(rewards)
    [own] = [k for k, reward in enumerate(columns) if reward.gate is not None and reward.gate.apart]
    others = [k for k in range(len(columns)) if k != own]
    values = scores.values.masked_fill(~samples.outcomes[:, None], torch.nan)
    rest = replace(scores, values=values[:, others], weights=scores.weights[others])
    # Behind a closed gate this reward is NaN, so it changes no failure, and no success to which it does not apply.
    return positive_only_advantages(
        total_reward(rest, samples), values[:, own], ~values[:, own].isnan(), samples.groups,
        weight=float(scores.weights[own]), eps=eps, ddof=ddof,
    )  # fmt: skip
