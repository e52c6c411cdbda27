"""The base class of objectives that train the recorded edges of a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.diagnostics import step_statistics
from ...core.penalties import Edges
from ...core.surrogates import require_gradient
from ...parts.choice import Choice
from ...parts.traits import offering
from .objective import ObjectiveSetting, Outcome, Penalties, Unmeasured, pair

if TYPE_CHECKING:
    from ...pipelines.experience import Experience
    from ...pipelines.scored_edges import ScoredEdges
    from ...samplers.transitions import Transitions

    Batch = tuple[Transitions, slice]


def steps_to_score(recipe: Any, choice: Choice) -> list[str]:
    """A need of objectives that train states of a rollout, with noise in its steps or without: the plan trains some."""
    plan = recipe.sampler.plan
    if offering(plan, "given") or (offering(plan, "noiseless") and not offering(plan, "neighbours")):
        mend = "use another plan" if offering(plan, "given") else "set sampler.plan.window, such as window: all"
        return [f"objective {choice.short} trains steps, and sampler.plan {plan.short} trains none here; {mend}"]
    return []


class EdgeObjective(Unmeasured, ABC):
    """An objective that scores the stochastic edges of a rollout again; a subclass gives the `loss`.

    Args:
        setting: of the run.

    Attributes:
        trains: what is trained, a key of `parts.traits.TRAINED`.
    """

    trains = "steps"

    def __init__(self, setting: ObjectiveSetting) -> None:
        self.recipe, self.policy, self.elements = setting.recipe, setting.policy, setting.elements
        self.controls = setting.controls
        self.penalties = Penalties(setting.recipe.penalties, setting.elements)

    def rows(self, experience: Experience, part: int, keep: Tensor | None) -> int:
        """How many trained edges one part has."""
        nodes = [t.node[t.edges_of(b)] for t, b in experience.batches(part)]
        return sum(len(n) if keep is None else int(keep[n].sum()) for n in nodes)

    def batches(self, experience: Experience, part: int, keep: Tensor | None) -> Iterator[Batch]:
        """Recorded batches of states that have a kept edge."""
        return experience.batches(part, keep)

    def backward(
        self, experience: Experience, batch: Batch, advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one recorded batch of states."""
        scored = self.score(experience, batch)
        advantage = advantages[scored.node]
        mask = None if keep is None else keep[scored.node].to(advantage.device)[:, None]
        marks = experience.marks_of(scored.node)
        penalties = self.penalties.of(edges_of(scored, batch[0].step, advantage, mask, marks))
        scaled = self.penalties.weighted(penalties)
        penalty = torch.stack(scaled).sum(0) if scaled else None
        loss, metrics = self.loss(scored, advantage, mask, penalty, rows)
        require_gradient(f"objective {type(self).__name__}", loss, "`scored.log_ratio`")
        self.policy.weights.backward(loss)
        for name, value in penalties.items():
            metrics[name] = pair(value.detach())
        metrics |= self.more_metrics(scored, mask, metrics)
        detached = scored.log_ratio.detach()
        held = self.held(scored, advantage, mask)
        statistics = step_statistics(
            detached, scored.steps, advantage[:, None], mask, held, num_steps=experience.plan.num_steps
        )
        return Outcome(statistics.cpu(), metrics, detached.abs().max().cpu())

    def score(self, experience: Experience, batch: Batch) -> ScoredEdges:
        """Recorded edges under the present policy."""
        return self.policy.score(experience, *batch)

    @abstractmethod
    def loss(
        self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None, penalty: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch of E edges.

        Args:
            scored: the edges under the present policy.
            advantage: [E].
            mask: [E, 1] bool, the edges that are trained; None for all.
            penalty: [E, 1] weighted sum of the penalties; None if there are no penalties.
            rows: the number of edges of the whole optimizer step. The loss is a sum over the batch, divided by `rows`.

        Returns:
            The loss, a number with a gradient, and metrics, name -> [sum, count]. One metric is "loss".
        """

    def more_metrics(self, scored: ScoredEdges, mask: Tensor | None, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Further metrics of a batch, by name."""
        return {}

    def held(self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None) -> Tensor | None:
        """[E, 1] bool: edges that have no gradient because of a bound; None if the objective has no bounds."""
        return None


def edges_of(
    scored: ScoredEdges, step: int, advantage: Tensor, mask: Tensor | None, marks: Mapping[str, Tensor] | None = None
) -> Edges:
    """The input of penalties: scored edges of a denoising step, with advantages [E], a mask [E, 1] and marks [E]."""
    return Edges(
        step=step,
        std=scored.std,
        shift=scored.shift,
        log_ratio=scored.log_ratio,
        advantage=advantage,
        mask=mask,
        to_reference=scored.to_reference,
        to_guided=scored.to_guided,
        to_teacher=scored.to_teacher,
        scale=scored.scale,
        to_data=scored.to_data,
        marks=marks or {},
    )
