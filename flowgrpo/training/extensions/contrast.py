"""A behaviour is rewarded only where it helped its group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...configs.reading_soundness import reward_place
from ...core.combination import contrastive_signs
from ...parts.choice import Choice
from ...parts.needs import needs
from ...parts.ranges import Given, NotNegative
from ..credit.pooling import Batch
from ..credit.strata import signal_values
from .extension import Extension, Rewards
from .rules import names_a_reward, once_per_reward, unknown_reward


def _two_rewards(recipe: Any, choice: Choice) -> list[str]:
    found = unknown_reward(recipe, "extension contrast (outcome)", choice["outcome"])
    if not found and reward_place(recipe.rewards, choice["reward"]) == reward_place(recipe.rewards, choice["outcome"]):
        found = [
            f"extension contrast asks reward {choice['outcome']} whether the behaviour of the same reward helped; name "
            "another reward as outcome"
        ]
    return found


@needs(names_a_reward, once_per_reward, _two_rewards)
class Contrast(Extension):
    """Rewards a behaviour where it helped, and punishes it where it did harm (GCPO of GeometryZero, 2506.07160).

    The score of the reward becomes 1 for a sample that shows the behaviour, if the samples of its prompt that show it
    have a better mean outcome than samples without it. It becomes -1 if their mean is worse. It becomes 0 if the means
    are equal or differ by less than `margin`, if all samples show the behaviour, or if none does. It is 0 for a sample
    without the behaviour, and NaN stays NaN. Metrics, gates and saved samples have the new score.

    Args:
        reward: Label (or name) of the reward that finds the behaviour, such as `text_format` with a `pattern`.
        sub_score: One of its sub-scores that finds the behaviour; the reward itself if left out.
        at_least: Smallest score of a sample that shows the behaviour.
        outcome: Label (or name) of the reward that says how well a sample did.
        margin: By how much the means must differ, or more.
    """

    def __init__(
        self,
        *,
        reward: str,
        outcome: str,
        sub_score: str | None = None,
        at_least: float = 1.0,
        margin: NotNegative = 0.0,
        rewards: Given[Rewards],
    ) -> None:
        self.reward, self.outcome = rewards.reported(reward), rewards.reported(outcome)
        self.sub_score, self.at_least, self.margin = sub_score, at_least, margin

    def samples_scored(self, batch: Batch) -> Batch:
        """Replace the scores of the behaviour; raises ValueError if the reward does not give the sub-score."""
        scores, experience = batch.scores, batch.experience
        found = torch.tensor(signal_values(scores, self.reward, self.sub_score, "extension contrast"))
        outcome = scores.values[:, scores.names.index(self.outcome)].masked_fill(~experience.outcomes, torch.nan)
        shown = (found >= self.at_least).to(found).masked_fill(found.isnan(), torch.nan)
        values = scores.values.clone()
        signs = contrastive_signs(shown, outcome, experience.groups, margin=self.margin)
        values[:, scores.names.index(self.reward)] = signs.to(values)
        return replace(batch, scores=replace(scores, values=values))
