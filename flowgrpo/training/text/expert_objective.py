"""The objective over tokens, with the likelihood of an expert's completions beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from ...core.surrogates import clip
from ...parts.choice import Of
from ...parts.needs import Need, needs
from ...parts.ranges import Positive
from .forms.expert import EXPERT
from .text_objective import ScoredTokens
from .token_objective import TokenObjective, of_tokens

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...configs.schema import TextRecipe
    from ..controls import Controls
    from .text_policy import Completions, TextPolicy


@needs(of_tokens, Need("rollout.form", ("expert",), "trains on completions of an expert, which this form writes"))
class GuidedObjective(TokenObjective):
    """A surrogate on the policy's own tokens, and the log-likelihood of an expert's (AHPO of MM-HELIX, 2510.08540).

    The loss is the sum of the surrogate over the policy's tokens, minus `weight` times the log-probs of the expert's
    tokens, divided by the number of all these tokens. Form `expert` decides for which prompts the expert is asked. So
    the policy imitates where rewards are sparse, and explores alone where it succeeds.

    Args:
        recipe: what to do.
        policy: scores completions.
        controls: coefficients that move; this objective has none.
        surrogate: the surrogate of the ratio of tokens.
        weight: weight of the expert's tokens.
    """

    def __init__(
        self,
        recipe: TextRecipe,
        policy: TextPolicy,
        controls: Controls | None = None,
        *,
        surrogate: Annotated[Callable[..., Tensor], Of("surrogate", "clip")] = clip,
        weight: Positive = 1.0,
    ) -> None:
        super().__init__(recipe, policy, controls, surrogate=surrogate)
        self.expert_weight = weight

    def rows(self, experience: Completions, part: int, keep: Tensor | None) -> int:
        """How many tokens a part has, the policy's and the expert's together."""
        mine = [row for rows in self.batches(experience, part, None) for row in rows]
        return super().rows(experience, part, keep) + int(_expert(experience, mine).sum())

    def _scored_ones(self, experience: Completions) -> list[bool]:
        told, counted = experience.origins(), experience.counted or [True] * len(experience.samples)
        return [own or bool(one.get(EXPERT)) for own, one in zip(counted, told)]

    def _loss(self, experience: Completions, scored: ScoredTokens, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super()._loss(experience, scored, rows)
        expert = _expert(experience, scored.batch).to(scored.mask.device)
        unlikely = -torch.where(expert, scored.log_probs, 0.0).sum()
        metrics["expert_loss"] = torch.stack([unlikely.detach(), expert.sum().to(unlikely)])
        metrics["loss"] = metrics["loss"] + metrics["expert_loss"] * metrics["loss"].new_tensor([self.expert_weight, 1])
        return loss + self.expert_weight * unlikely / rows, metrics


def _expert(experience: Completions, rows: list[int]) -> Tensor:
    """[R, T] bool: tokens of completions of the expert."""
    if not rows:
        return torch.zeros(0, 1, dtype=torch.bool)
    told = experience.origins()
    return experience.trained(rows) & torch.tensor([bool(told[row].get(EXPERT)) for row in rows])[:, None]
