"""What a credit is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from .combining import total_reward

if TYPE_CHECKING:
    from ...rewards.runner import RewardBatch
    from ..images.critic import Critic


@dataclass(frozen=True)
class Judged:
    """A rollout of this process, and what its samples were worth.

    Attributes:
        experience: the rollout; `pipelines.policy.Experience` of images, `training.text_policy.Completions` of text. It
            has L samples and N nodes; a completion is a node.
        scores: of its L samples, [L, K], after gates and corrections.
        advantages: [L] of the samples; None where `advantage` is null.
        critic: of the recipe; None where it has none.
        task: what the samples are.
    """

    experience: Any
    scores: RewardBatch
    advantages: Tensor | None
    critic: Critic | None = None
    task: Literal["images", "text"] = "images"

    def rewards(self, *, previews: bool = False, across: bool = False) -> Tensor:
        """[L] weighted sums of the rewards; NaN where none applies.

        Args:
            previews: those of previews of a state too, which are NaN if left out.
            across: for comparisons of groups with each other: a reward that a whole group lacks counts as its mean
                over the batch.
        """
        return total_reward(self.scores, self.experience, previews=previews, between=across)

    def of_samples(self) -> Tensor:
        """[N] the advantages of the samples, at the nodes that lead to them: the mean where several do.

        Raises:
            ValueError: `advantage` is null.
        """
        if self.advantages is None:
            raise ValueError("the credit works on the advantages of samples, and advantage is null; choose one")
        found: Tensor = self.experience.node_advantages(self.advantages)
        return found
