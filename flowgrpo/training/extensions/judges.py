"""Several judges that a sample must satisfy before it may be learned from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from ...core.judged_samples import calibrated_advantages, satisfied_judges
from ...parts.choice import Choice
from ...parts.needs import Need, alone, needs
from ...parts.ranges import Given, Positive
from ..credit.combining import total_reward
from .extension import CREDIT, Comparison, Extension, Rewards
from .rules import once, unknown_reward

Bar = Annotated[float, Field(allow_inf_nan=False)]


def _judges_are_rewards(recipe: Any, choice: Choice) -> list[str]:
    if not choice["at_least"]:
        return ["extension judges names no judge; write at_least: {REWARD: SCORE}"]
    return [fault for name in choice["at_least"] for fault in unknown_reward(recipe, "extension judges", name)]


@needs(
    once, _judges_are_rewards, alone("multipliers", "replaces the advantages within a group"),
    Need(CREDIT, ("leaf",), "changes the advantages of samples, not of steps"),
    Need("advantage", ("group",), "replaces the advantages within a group"),
)  # fmt: skip
class Judges(Extension):
    """Gives credit only to samples that satisfy all of several judges (CGPO, The Perfect Blend, 2409.20370).

    A judge is a reward with a least score. It satisfies a constraint of its own, so its weight in the sum is usually 0;
    the reward that is optimised has another weight. A judge that does not apply to a sample (NaN) has no say on it, so
    each task of a mixture may have judges of its own.

    A sample that violates a judge has advantage 0. The others have sigmoid((r - b) / scale): r is the weighted sum of
    rewards, and b is its mean in the group. These advantages replace the advantages of the recipe's `advantage`, so
    write `judges` before extensions that change advantages. No advantage is negative, so add a penalty that holds the
    policy near the base model, as the paper does.

    Args:
        at_least: Label (or name) of each judge -> least score that satisfies it.
        keep: `all`: every satisfying sample is pushed (the paper's policy gradient, CRPG). `best`: only the best
            satisfying sample of a prompt (its reward ranking, CRRAFT).
        scale: What differences of rewards are divided by.
    """

    def __init__(
        self,
        *,
        at_least: dict[str, Bar],
        keep: Literal["all", "best"] = "all",
        scale: Positive = 1.0,
        rewards: Given[Rewards],
    ) -> None:
        self.bars: Mapping[str, float] = {rewards.reported(name): bar for name, bar in at_least.items()}
        self.best, self.scale = keep == "best", scale
        self._satisfied = 0.0

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """Replace the advantages."""
        samples = comparison.samples
        columns = [samples.scores.names.index(name) for name in self.bars]
        satisfied = satisfied_judges(samples.scores.values[:, columns], list(self.bars.values()))
        self._satisfied = float(satisfied[samples.outcomes].float().mean())
        rewards = total_reward(comparison.scores, samples)
        return calibrated_advantages(rewards, satisfied, samples.groups, best=self.best, scale=self.scale)

    def record(self) -> dict[str, float]:
        """Share of the samples that satisfy all judges."""
        return {"judges/satisfied": self._satisfied}
