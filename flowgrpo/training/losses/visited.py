"""The objective of distillation: penalties alone, at the states that the policy visits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...parts.needs import SOMETHING, Need, needs
from .edges import EdgeObjective, steps_to_score
from .objective import pair

if TYPE_CHECKING:
    from ...pipelines.scored_edges import ScoredEdges


@needs(steps_to_score, Need("penalties", (SOMETHING,), "has no loss but the penalties", mend="add penalty taught"))
class VisitedObjective(EdgeObjective):
    """The sum of the penalties at the states that the policy visits (DiffusionOPD, 2605.15055).

    Rewards and their advantages have no part in the loss. The states come from steps with noise, or without.

    Args:
        setting: of the run.
    """

    trains = "states"

    def loss(
        self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None, penalty: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the penalties over the trained edges, divided by `rows`."""
        assert penalty is not None
        trained = penalty if mask is None else penalty[mask][:, None]
        return trained.sum() / rows, {"loss": pair(trained.detach()), "penalty": pair(trained.detach())}
