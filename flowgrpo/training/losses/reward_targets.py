"""The objective that fits targets which rewards have moved: the policy's own prediction, made better and worse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...configs.sections import EmaConfig
from ...core.nearby_targets import target_loss, targets
from ...parts.choice import Choice
from ...parts.needs import needs, one_round
from ...parts.ranges import Count, Inside, Positive
from .edges import EdgeObjective, steps_to_score
from .objective import ObjectiveSetting, pair
from .reward_gradient import chains_without_noise, differentiated, weighted_sum

if TYPE_CHECKING:
    from ...pipelines.experience import Experience
    from ...pipelines.scored_edges import ScoredEdges
    from .edges import Batch


def _in_order(recipe: Any, choice: Choice) -> list[str]:
    if recipe.optimizer.epochs == 1:
        return []
    return [
        f"objective {choice.short} makes its targets anew in each pass over a rollout, and optimizer.epochs is "
        f"{recipe.optimizer.epochs}; use optimizer.epochs 1, and more iterations"
    ]


@needs(steps_to_score, chains_without_noise, weighted_sum, one_round("takes the gradients of one rollout"), _in_order)
class RewardTargetsObjective(EdgeObjective):
    """The clean images that states predict are fitted to better ones, and pushed from worse ones (DiffusionOPSD).

    At each trained state the policy that sampled predicts a clean image y. A few steps along the gradients of the
    rewards, through the pipeline's own decoder, lead to a better image y+, and as many steps against them to a worse
    image y-. Both stay near y. The graph ends there: the trained policy then fits its own prediction to y+ and, by an
    implicit negative policy as in DiffusionNFT, away from y-. The advantage of the finished image says how much each of
    them counts. So the rewards must be differentiable, and images of a prompt are compared too.

    One late state of each image is enough: at high noise levels the predicted image is blurred. The paper takes the
    state whose noise level is nearest to 0.278.

    Args:
        setting: of the run.
        radius: How far targets may be from y, as a share of the norm of y.
        ascents: Steps of the ascent, and of the descent.
        beta: Strength of the implicit policies.
        bound: The advantage at which an image counts as wholly good or bad.
        old: An average of the weights that samples; if left out, the trained weights themselves sample.
    """

    trains = "targets"

    def __init__(
        self,
        setting: ObjectiveSetting,
        *,
        radius: Inside = 0.1,
        ascents: Count = 2,
        beta: Positive = 1.0,
        bound: Positive = 5.0,
        old: EmaConfig | None = None,
    ) -> None:
        super().__init__(setting)
        self.radius, self.ascents, self.beta, self.bound = radius, ascents, beta, bound
        assert setting.rewards is not None
        self.rewards = setting.rewards
        self._image = torch.empty(0, dtype=torch.long)
        # How far the targets of a batch are from its predictions, and its noise level.
        self._rise, self._fall, self._sigma = torch.empty(0), torch.empty(0), 0.0

    def prepare(self, experience: Experience) -> None:
        """Find the image to which each state leads."""
        self._image = experience.image_of_node()

    def score(self, experience: Experience, batch: Batch) -> ScoredEdges:
        """Recorded edges under the present policy, after the targets of their states."""
        transitions, rows = batch
        nodes = transitions.node[transitions.edges_of(rows)]
        owners = experience.rollout.leaf_prompt[self._image[nodes]].tolist()
        prompts, self._sigma = [experience.rows[p] for p in owners], transitions.coefficients.sigma
        velocity = self.policy.brought(transitions.velocity[rows]).float()
        clean = self.policy.brought(transitions.x[rows]).float() - self._sigma * velocity

        def slope(x: Tensor) -> Tensor:
            return differentiated(self.policy, self.rewards, x, prompts, experience.rows)[1]

        self._rise, self._fall = targets(clean, slope, radius=self.radius, ascents=self.ascents)
        return super().score(experience, batch)

    def loss(
        self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None, penalty: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The distance of both predictions from their targets, and the penalties."""
        # A velocity moves the clean image by the whole noise level, and its step by `scale`.
        moved = -self._sigma / scored.scale * scored.shift.float()
        loss = target_loss(moved, self._rise, self._fall, advantage, beta=self.beta, bound=self.bound)[:, None]
        metrics = {}
        if penalty is not None:
            loss = loss + penalty
            metrics["penalty"] = pair(penalty.detach())
        trained = loss if mask is None else loss * mask
        return trained.sum() / rows, {"loss": pair(loss.detach()), **metrics}
