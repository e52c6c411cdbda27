"""The objective of the steps that a rollout took: each recorded step of unmasking has a log-prob and a ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from ...core.surrogates import clip
from ...parts.choice import Of
from ...parts.needs import needs
from ...samplers.transitions import Transitions
from .masked_objective import MaskedObjective, ScoredColumns, plain_inputs

if TYPE_CHECKING:
    from ...configs.schema import MaskedRecipe
    from ..controls import Controls
    from .masked_policy import MaskedPolicy, RevealedTokens, UnmaskedTexts

    Batch = tuple[Transitions, slice]

Surrogate = Annotated[Callable[..., Tensor], Of("surrogate", "clip")]


@needs(plain_inputs)
class RevealObjective(MaskedObjective):
    """A surrogate of the ratio of each step of unmasking that the rollout took. The first ratio is exactly 1.

    The log-prob of a step is the sum of the log-probs of the tokens that it reveals; see `samplers.unmasking` for the
    orders with which this is the exact density of the step.

    Args:
        recipe: what to do.
        policy: samples and scores.
        controls: coefficients that move; this objective has none.
        surrogate: The surrogate of the ratio.
        column: What has a ratio: `step`, all tokens of a step together, or `token`, each of them.
    """

    trains = "steps"

    def __init__(
        self,
        recipe: MaskedRecipe,
        policy: MaskedPolicy,
        controls: Controls,
        *,
        surrogate: Surrogate = clip,
        column: Literal["step", "token"] = "token",
    ) -> None:
        super().__init__(recipe, policy, surrogate, "token")
        self.column = column

    def batches(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> Iterator[Batch]:
        """Recorded batches of states that have a kept edge which reveals something."""
        for transitions, batch in experience.batches(part, keep):
            if bool(self._revealed(transitions, batch, keep).any()):
                yield transitions, batch

    def rows(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> int:
        """How many steps of one part reveal something, or how many tokens they reveal."""
        found = [self._revealed(*batch, keep) for batch in experience.batches(part, keep)]
        return sum(int(each.sum() if self.column == "token" else (each > 0).sum()) for each in found)

    def _revealed(self, transitions: Transitions, batch: slice, keep: Tensor | None) -> Tensor:
        """How many tokens each kept edge of a batch reveals, in host memory."""
        edges = transitions.edges_of(batch)
        masks = (x == self.policy.moves.mask for x in (transitions.x, transitions.x_next[edges]))
        before, after = (mask.sum(1).cpu() for mask in masks)
        revealed = before[transitions.state[edges].cpu()] - after
        return revealed if keep is None else revealed[keep[transitions.node[edges]].cpu()]

    def scored(self, experience: UnmaskedTexts, batch: Batch, advantages: Tensor) -> ScoredColumns:
        """The edges of recorded states under the current policy."""
        found = self.policy.score(experience, *batch)

        def reference() -> Tensor:
            with torch.no_grad(), self.policy.reference():
                return self._columns(self.policy.score(experience, *batch)).log_probs

        return replace(self._columns(found), reference=reference)

    def _columns(self, found: RevealedTokens) -> ScoredColumns:
        log_probs, old, mask = found.log_probs, found.old, found.mask
        if self.column == "step":
            log_probs, old, mask = log_probs.sum(1, True), old.sum(1, True), mask.any(1, True)
        step = torch.full((len(log_probs), 1), found.step, device=log_probs.device)
        return ScoredColumns(log_probs, old, mask, found.node, step, lambda: log_probs)
