"""The objective between two bounds of a log-prob, and all objectives of masked models by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from ...core.likelihoods import Passes, blocks, upper_bound
from ...core.surrogates import reinforce
from ...parts.choice import Of
from ...parts.needs import needs
from ...parts.ranges import AtLeastOne, Share
from ..losses.objective import Objective
from .estimated import EstimatedObjective
from .masked_answers import MaskedAnswers
from .masked_objective import ScoredColumns, plain_inputs
from .trajectory import RevealObjective

if TYPE_CHECKING:
    from ...configs.schema import MaskedRecipe
    from ..controls import Controls
    from .estimated import Batch
    from .masked_policy import MaskedPolicy, UnmaskedTexts


@needs(plain_inputs)
class SandwichedObjective(EstimatedObjective):
    """The policy gradient without a ratio on two bounds of the log-prob of a completion (SPG, arXiv 2510.09541).

    To sink a lower bound need not sink the log-prob. So the lower bound counts where the advantage is above 0, and an
    upper bound where it is below 0. The log-prob of all passes over a completion goes into the upper bound at once, so
    they are in memory together.

    Args:
        recipe: what to do.
        policy: samples and scores.
        controls: coefficients that move; this objective has none.
        likelihood: The passes, and their weights in the lower bound.
        beta: Power of the probabilities in the upper bound.
        mix: Share of the upper bound where the advantage is below 0; the rest is the lower bound.
    """

    def __init__(
        self,
        recipe: MaskedRecipe,
        policy: MaskedPolicy,
        controls: Controls,
        *,
        likelihood: Annotated[Callable[..., Passes], Of("likelihood", "blocks")] = blocks,
        beta: AtLeastOne = 1.5,
        mix: Share = 0.5,
    ) -> None:
        super().__init__(recipe, policy, controls, surrogate=reinforce, likelihood=likelihood, level="token")
        self.beta, self.mix = beta, mix

    def batches(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> Iterator[Batch]:
        """Leaves that are evaluated together, as many as `rollout.batch` in each pass of the likelihood."""
        yield from ((leaves, None) for leaves in self._leaves(experience, part))

    def joined(self, log_probs: Sequence[Tensor], weights: Sequence[Tensor], text: Tensor) -> Tensor:
        """[R, 2, L] what counts for good completions, and for bad ones; the arguments are those of the base class."""
        lower = super().joined(log_probs, weights, text)
        upper = upper_bound(log_probs, weights, text, beta=self.beta)
        return torch.stack([lower, self.mix * upper + (1 - self.mix) * lower], dim=1)

    def scored(self, experience: UnmaskedTexts, batch: Batch, advantages: Tensor) -> ScoredColumns:
        """The completions of a batch under the current policy, each by the bound that its advantage asks for."""
        both = super().scored(experience, batch, advantages)
        bad = (advantages[both.node] < 0).to(both.log_probs.device)[:, None]

        def chosen(bounds: Tensor) -> Tensor:
            return torch.where(bad, bounds[:, 1], bounds[:, 0])

        return replace(
            both, log_probs=chosen(both.log_probs), old=chosen(both.old), reference=lambda: chosen(both.reference())
        )


MASKED_OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "trajectory": RevealObjective,
    "estimated": EstimatedObjective,
    "sandwiched": SandwichedObjective,
    "answers": MaskedAnswers,
}
"""`objective(recipe, policy, controls, *, ...)`: a class with the methods of `losses.objective.Objective`."""
