"""What a run remembers of its prompts from one iteration to the next, as far as its recipe asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..configs.schema import AnyRecipe, TextRecipe
from ..core.addressing import address
from ..core.advantages import group_advantages, multi_reward_advantages
from ..core.combination import Multipliers, constrained_advantages
from ..core.replay import Successes, VarianceCurriculum, answer_diversity
from ..core.trackers import CumulativeStandardiser, ValueTracker
from ..rewards.runner import RewardBatch
from .checkpoint import Stateful
from .combining import counted_rewards, total_reward
from .data import PromptRow
from .text_visits import Visits

if TYPE_CHECKING:
    from .pooled import Pooled


class Memory:
    """Curriculum, estimators with a history, multipliers of constraints, and past successes.

    It is told of the samples of all processes, so that each remembers the same, whatever their number.

    Args:
        recipe: what to remember.
    """

    def __init__(self, recipe: AnyRecipe) -> None:
        self.recipe = recipe
        advantage, curriculum = recipe.advantage, recipe.data.curriculum
        self.curriculum = VarianceCurriculum(decay=curriculum.decay, mix=curriculum.mix) if curriculum else None
        self._means: dict[str, float] = {}
        self.tracker: ValueTracker | CumulativeStandardiser | None = None
        options: dict[str, Any] = dict(advantage.estimator_options)
        if advantage.estimator == "tracked":
            self.tracker = ValueTracker(**_known(options, ("prior", "half_life", "low", "high"), "tracked"))
        if advantage.estimator == "cumulative":
            _known(options, (), "cumulative")
            self.tracker = CumulativeStandardiser(eps=advantage.eps, ddof=advantage.ddof)
        self._rewards = counted_rewards(recipe.rewards)
        self.constraints = [k for k, reward in enumerate(self._rewards) if reward.at_least is not None]
        chosen = advantage.multipliers
        wanted = [reward.at_least for reward in self._rewards if reward.at_least is not None]
        self.multipliers = (
            Multipliers(wanted, rate=chosen.rate, initial=chosen.initial, maximum=chosen.maximum) if wanted else None
        )
        self.visits = Visits() if advantage.forget == "divergence" else None
        replay = recipe.rollout.replay if isinstance(recipe, TextRecipe) else 0
        self.successes = Successes(replay) if replay else None

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds, by file name."""
        named: dict[str, Stateful | None] = {
            "curriculum": self.curriculum, "tracker": self.tracker, "multipliers": self.multipliers,
            "successes": self.successes, "visits": self.visits,
        }  # fmt: skip
        return {name: part for name, part in named.items() if part is not None}

    @property
    def estimates(self) -> bool:
        """Whether the advantages of this recipe need what was remembered."""
        return self.tracker is not None or self.multipliers is not None

    def draw(self, rows: Sequence[PromptRow], iteration: int, count: int) -> list[PromptRow]:
        """The prompts of an iteration, of all processes, by the curriculum; none twice while there are enough."""
        assert self.curriculum is not None
        shares = np.array(self.curriculum.probabilities([row.id for row in rows]))
        generator = np.random.default_rng(address(self.recipe.run.seed, 7, iteration))
        possible = int((shares > 0).sum())
        chosen = generator.choice(len(rows), size=count, replace=count > possible, p=shares / shares.sum())
        return [rows[int(k)] for k in chosen]

    def advantages(self, scores: RewardBatch, samples: Pooled) -> Tensor:
        """[L] advantages of samples, and what they teach is remembered: call it once an iteration.

        Args:
            scores: [L, K], combined, of all processes.
            samples: of all processes; those that are no results have no reward.
        """
        values = scores.values.masked_fill(~samples.outcomes[:, None], torch.nan)
        if self.tracker is None:
            return self._constrained(scores, values, samples.groups)
        total, prompts, divergence = total_reward(scores, samples), samples.prompts, samples.divergence
        settings = self.recipe.advantage
        if isinstance(self.tracker, ValueTracker):
            moved = None if divergence is None else divergence.nan_to_num(0.0)
            if divergence is not None and not bool(divergence.isnan().all()):
                self._means["divergence"] = float(divergence.nanmean())
            return self.tracker.advantages(total, prompts, moved, eps=settings.eps, ddof=settings.ddof)
        return self.tracker.advantages(total, prompts)

    def _constrained(self, scores: RewardBatch, values: Tensor, groups: Tensor) -> Tensor:
        """Advantages of the aim and of the constraints, with multipliers moved after this rollout."""
        assert self.multipliers is not None
        settings = self.recipe.advantage
        options: dict[str, Any] = {"eps": settings.eps, "ddof": settings.ddof, "scale": settings.scale}
        aims = [k for k in range(values.shape[1]) if k not in self.constraints]
        main = multi_reward_advantages(values[:, aims], groups, scores.weights[aims], how="sum", **options)
        each = [group_advantages(values[:, k], groups, **options) for k in self.constraints]
        found = constrained_advantages(main, torch.stack(each, 1), self.multipliers.values)
        self.multipliers.step(values[:, self.constraints])
        return found

    def observe(self, samples: Pooled) -> None:
        """Add the rewards of the samples of all processes, and the answers, to the history of their prompts."""
        if self.curriculum is None:
            return
        scores, ids = samples.scores, torch.tensor(samples.prompts)
        rewards = total_reward(scores, samples)
        settings = self.recipe.data.curriculum
        chosen = settings.diversity if settings is not None else None
        found = []
        for prompt in dict.fromkeys(ids.tolist()):
            rows = (ids == prompt).nonzero().flatten().tolist()
            if chosen is not None:
                answers = scores.answers[chosen.reward]
                found.append(answer_diversity(answers[row] for row in rows))
            added = chosen.weight * found[-1] if chosen is not None else 0.0
            self.curriculum.observe(prompt, rewards[rows].tolist(), added)
        if found:
            self._means["diversity"] = sum(found) / len(found)

    def record(self) -> dict[str, float]:
        """What the metrics say of it since they last did."""
        means, self._means = self._means, {}
        if self.multipliers is None:
            return means
        named = zip(self.constraints, self.multipliers.values.tolist())
        labels = [reward.label or reward.name for reward in self._rewards]
        return means | {f"multiplier/{labels[k]}": value for k, value in named}


def _known(options: dict[str, Any], names: Sequence[str], estimator: str) -> dict[str, Any]:
    for name in options:
        if name not in names:
            raise ValueError(
                f"advantage.estimator_options has {name!r}, which estimator {estimator} does not take; it takes "
                f"{', '.join(names) or 'none'}"
            )
    return options
