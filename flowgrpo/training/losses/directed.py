"""The objective that pulls the velocities of whole trajectories along the differences of a group's images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from ...core.directions import directions, log_ratio_along
from ...core.objectives import held_columns, policy_loss
from ...core.trust_regions import spo
from ...parts.choice import Choice, Of
from ...parts.needs import needs
from ...parts.traits import offering
from .edges import EdgeObjective, steps_to_score
from .objective import ObjectiveSetting

if TYPE_CHECKING:
    from ...pipelines.experience import Experience
    from ...pipelines.scored_edges import ScoredEdges
    from .edges import Batch

Surrogate = Annotated[Callable[..., Tensor], Of("surrogate", "spo")]


def _one_image_for_a_chain(recipe: Any, choice: Choice) -> list[str]:
    plan = recipe.sampler.plan
    if not offering(plan, "branches"):
        return []
    return [
        f"objective {choice.short} follows each state to its one image, and with sampler.plan {plan.short} a state may "
        "become several images; use plan window without probe, or plan ode with a window"
    ]


def _no_densities(recipe: Any, choice: Choice) -> list[str]:
    if choice["surrogate"].name != "clip_nats":
        return []
    return [
        f"objective.surrogate clip_nats bounds a ratio of densities in nats, and the ratio of objective {choice.short} "
        "says how far a velocity has moved; use surrogate spo or clip"
    ]


@needs(steps_to_score, _one_image_for_a_chain, _no_densities)
class DirectedObjective(EdgeObjective):
    """Finite difference flow optimisation: all states of a trajectory are pulled along the images' differences.

    A good image pulls the velocities of its own trajectory towards itself and away from the mean image of its group,
    and a bad image pushes them back (FDFO, 2603.12893). The trajectories of a group should differ little, because the
    method is a finite difference: they share their initial noise, or much of it. The states come from steps with noise,
    or without.

    Args:
        setting: of the run.
        surrogate: The surrogate of the ratio, where the ratio says how far a velocity has moved along its direction.
    """

    trains = "velocities"

    def __init__(self, setting: ObjectiveSetting, *, surrogate: Surrogate = spo) -> None:
        super().__init__(setting)
        self.surrogate = surrogate
        self._image = torch.empty(0, dtype=torch.long)

    def prepare(self, experience: Experience) -> None:
        """Find the image to which each state leads."""
        self._image = experience.image_of_node()

    def score(self, experience: Experience, batch: Batch) -> ScoredEdges:
        """Recorded edges under the present policy; their ratio says how far the velocity has moved along d."""
        scored = super().score(experience, batch)
        direction = self._of_images(experience, self._image[scored.node])
        return replace(scored, log_ratio=log_ratio_along(scored.shift / scored.scale, direction)[:, None])

    def _of_images(self, experience: Experience, images: Tensor) -> Tensor:
        """[E, ...] the directions of some images."""
        # They are not kept: they would need twice the memory of the images in half precision.
        groups, x = experience.groups, experience.rollout.x
        near = torch.isin(groups, groups[images]).nonzero().flatten()
        found = directions(self.policy.brought(x[near.to(x.device)]), groups[near].to(self.policy.device))
        return found[torch.searchsorted(near, images).to(found.device)]

    def loss(
        self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None, penalty: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the surrogate; all states count alike."""
        return policy_loss(
            scored.log_ratio, torch.zeros_like(scored.log_ratio), advantage, mask,
            surrogate=self.surrogate, weight=torch.ones_like(scored.log_ratio.detach()),
            penalty=penalty, reduce="token", denom=rows,
        )  # fmt: skip

    def held(self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None) -> Tensor:
        """[E, 1] bool: edges that the surrogate leaves without a gradient."""
        detached = scored.log_ratio.detach()
        return held_columns(detached, torch.zeros_like(detached), advantage, mask, surrogate=self.surrogate)
