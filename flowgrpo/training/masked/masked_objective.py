"""What the objectives of masked language models share: a surrogate, penalties of tokens, and statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.diagnostics import step_statistics
from ...core.objectives import held_columns, policy_loss
from ...parts.asked import answered, not_given
from ...parts.choice import Choice, given_names
from ..losses.objective import Outcome, Unmeasured
from ..text.token_objective import PENALISED, penalties_of

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...configs.schema import MaskedRecipe
    from .masked_policy import MaskedPolicy, UnmaskedTexts


@dataclass(frozen=True)
class ScoredColumns:
    """R rows of up to T columns, under the current policy.

    Attributes:
        log_probs: [R, T] with gradients.
        old: [R, T] under the policy that sampled.
        mask: [R, T] bool, columns that count.
        node: [R] the node of each row, whose advantage the row has.
        step: [R, T] or [R, 1] the step of unmasking, for statistics.
        reference: gives [R, T] under the reference, by further calls of the model.
    """

    log_probs: Tensor
    old: Tensor
    mask: Tensor
    node: Tensor
    step: Tensor
    reference: Callable[[], Tensor]


def plain_inputs(recipe: MaskedRecipe, choice: Choice) -> list[str]:
    """Faults of a recipe: a surrogate or a penalty asks for what a run of a masked model does not give."""
    surrogate = choice.get("surrogate")
    wanted = [] if surrogate is None else given_names(surrogate.target)
    faults = [
        f"surrogate {surrogate.short} asks for {name!r}, and a run of a masked model does not give it; use another "
        "surrogate"
        for name in wanted
    ]
    return faults + [fault for penalty in recipe.penalties for fault in not_given(penalty, PENALISED)]


class MaskedObjective(Unmeasured, ABC):
    """The base class of objectives of masked language models; a subclass gives batches and scores them.

    Args:
        recipe: what to do.
        policy: samples and scores.
        surrogate: of the ratio, with its options bound.
        level: `token` or `sequence`, see `core.objectives.policy_loss`.
    """

    def __init__(
        self, recipe: MaskedRecipe, policy: MaskedPolicy, surrogate: Callable[..., Tensor], level: str
    ) -> None:
        self.recipe, self.policy, self.surrogate, self.level = recipe, policy, surrogate, level
        self.penalties = penalties_of(recipe)
        self.several = recipe.optimizer.updates * recipe.optimizer.epochs > 1

    @abstractmethod
    def batches(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> Iterator[Any]:
        """Batches of the rows of one part."""

    @abstractmethod
    def rows(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> int:
        """This rank's share of the number that divides the loss: the columns of a part of the rollout."""

    @abstractmethod
    def scored(self, experience: UnmaskedTexts, batch: Any, advantages: Tensor) -> ScoredColumns:
        """The rows of a batch under the current policy, whose log-probs may depend on the advantages of the nodes."""

    def backward(
        self, experience: UnmaskedTexts, batch: Any, advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one batch."""
        scored = self.scored(experience, batch, advantages)
        mask, advantage = scored.mask, advantages[scored.node].to(scored.log_probs.device)
        if keep is not None:
            mask = mask & keep[scored.node].to(mask.device)[:, None]
        found = self._penalties(scored, mask, advantage)
        penalty = torch.stack([factor * value for factor, value in found.values()]).sum(0) if found else None
        loss, metrics = policy_loss(
            scored.log_probs, scored.old, advantage, mask, surrogate=self.surrogate, level=self.level,
            penalty=penalty, reduce="token", denom=rows,
        )  # fmt: skip
        self.policy.weights.backward(loss)
        count = mask.sum().float()
        metrics["entropy"] = torch.stack([-torch.where(mask, scored.old, 0.0).sum(), count])
        for name, (_, value) in found.items():
            metrics[name] = torch.stack([torch.where(mask, value.detach(), 0.0).sum(), count])
        ratio = torch.where(mask, (scored.log_probs - scored.old).detach(), 0.0)
        held = held_columns(scored.log_probs, scored.old, advantage, mask, surrogate=self.surrogate, level=self.level)
        statistics = step_statistics(
            ratio, scored.step, advantage[:, None], mask, held, num_steps=experience.plan.num_steps
        )
        return Outcome(statistics.cpu(), metrics, ratio.abs().max().cpu())

    def _penalties(self, scored: ScoredColumns, mask: Tensor, advantage: Tensor) -> dict[str, tuple[float, Tensor]]:
        """Factor and values [R, T] of each penalty, by the name of its metric."""
        has: dict[str, Callable[[], Any]] = {
            "logp": lambda: scored.log_probs,
            "ref_logp": scored.reference,
            "old_logp": lambda: scored.old,
            "mask": lambda: mask,
            "adv": lambda: advantage,
        }
        return {name: (weight, answered(penalty, has)) for name, (weight, penalty) in self.penalties.items()}
