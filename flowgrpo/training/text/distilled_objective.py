"""The objective of distillation: the policy with more in its prompt, or another model, teaches the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from ...core.distillation import coarse_kl
from ...core.surrogates import clip
from ...parts.choice import Choice, Of, given_names
from ...parts.needs import needs
from ...parts.ranges import Count, NotNegative, Positive
from ...parts.traits import offered
from .frozen_teacher import frozen_teacher, shared_tokens
from .self_teacher import Target, predicted, teachers_of
from .text_objective import ScoredTokens
from .token_objective import TokenObjective, of_tokens

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...configs.schema import TextRecipe
    from ...text.scoring import Measure
    from ..controls import Controls
    from .text_policy import Completions, TextPolicy


def _has_teacher(recipe: TextRecipe, choice: Choice) -> list[str]:
    """Faults of a recipe: nothing says what the teacher knows, or the surrogate measures logits too."""
    faults = []
    if not offered(recipe, "teachers") and recipe.model.teacher is None:
        faults.append(
            f"text objective {choice.short} distils what the policy predicts when it knows more, and nothing says what "
            "it then knows; add extension teacher, or name another model as model.teacher"
        )
    if "curvature" in given_names(choice["surrogate"].target):
        faults.append(
            f"text objective {choice.short} measures the logits of a teacher's tokens, and surrogate "
            f"{choice['surrogate'].short} measures their curvature; use another surrogate"
        )
    return faults


@needs(of_tokens, _has_teacher)
class DistilledObjective(TokenObjective):
    """Completions that have a teacher are distilled, and a surrogate trains the others (SRPO, 2604.02288).

    The teacher is the policy itself, with the context that extension `teacher` gives a completion: a success of the
    group, or feedback. The loss of a token is the KL between the next-token distributions of the policy and of its
    teacher, which has no gradient. With `others: none` and teachers for all completions, this is SDPO (2601.20802). A
    batch is divided by the number of all its tokens.

    With `model.teacher`, the teacher is another model, frozen (on-policy distillation; GKD 2306.13649). It reads the
    prompts of the policy, and teaches all completions. With extension `teacher` beside it, it reads the extension's
    contexts instead, and teaches the completions that have one.

    Args:
        recipe: what to do.
        policy: scores completions.
        controls: coefficients that move; this objective has none.
        surrogate: the surrogate of the ratio of tokens, for completions without a teacher.
        others: whether completions without a teacher are trained by the surrogate, or not at all.
        weight: weight of the KL.
        direction: `reverse` is the KL of the policy from its teacher, `forward` the KL of the teacher from the policy.
        top: the KL is over so many tokens that are likeliest for the teacher, and one bin for all other tokens.
        doubt: the KL of a token has the weight e^(-doubt H), where H is the teacher's entropy in nats. So an unsure
            teacher teaches less.
    """

    def __init__(
        self,
        recipe: TextRecipe,
        policy: TextPolicy,
        controls: Controls | None = None,
        *,
        surrogate: Annotated[Callable[..., Tensor], Of("surrogate", "clip")] = clip,
        others: Literal["policy", "none"] = "policy",
        weight: Positive = 1.0,
        direction: Literal["reverse", "forward"] = "reverse",
        top: Count = 20,
        doubt: NotNegative = 0.0,
    ) -> None:
        super().__init__(recipe, policy, controls, surrogate=surrogate)
        self.others, self.kl_weight, self.direction, self.top, self.doubt = others, weight, direction, top, doubt
        self._temperature = recipe.generation.temperature
        self._target: Target | None = None
        self._teacher, self._tokens = policy, None
        if recipe.model.teacher is not None:
            self._teacher = frozen_teacher(policy, recipe.model.teacher)
            self._tokens = shared_tokens(policy.language)

    def rows(self, experience: Completions, part: int, keep: Tensor | None) -> int:
        """How many tokens a part has; with `others: none`, in completions that have a teacher."""
        if self.others == "policy":
            return super().rows(experience, part, keep)
        taught = self._counted(experience, keep) & torch.tensor([one is not None for one in self._contexts(experience)])
        mine = [row for rows in self.batches(experience, part, None) for row in rows if taught[row]]
        return int(experience.trained(mine).sum()) if mine else 0

    def _scored(
        self, experience: Completions, batch: list[int], advantages: Tensor, keep: Tensor | None
    ) -> ScoredTokens:
        contexts = self._contexts(experience)
        self._target = predicted(self._teacher, experience, contexts, batch, self.top, self._tokens)
        return super()._scored(experience, batch, advantages, keep)

    def _contexts(self, experience: Completions) -> Sequence[list[int] | None]:
        """What the teacher of each completion reads before it; None for a completion without a teacher."""
        if self._teacher is not self.policy and experience.teachers is None:
            return [experience.context(row) for row in range(len(experience.samples))]
        return teachers_of(experience)

    def _measure(self, experience: Completions, batch: list[int]) -> Measure | None:
        return None if self._target is None else partial(self._target.gaps, temperature=self._temperature)

    def _loss(self, experience: Completions, scored: ScoredTokens, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        target, mask = self._target, scored.mask
        taught = torch.zeros_like(mask) if target is None else mask & target.taught[:, None]
        rest = mask & ~taught if self.others == "policy" else torch.zeros_like(mask)
        loss, metrics = super()._loss(experience, replace(scored, mask=rest), rows)
        if self.others == "none":
            # No token has a ratio that counts, and a mean over none would be reported as lost.
            metrics = {"loss": metrics["loss"]}
        if target is None or scored.measured is None:
            return loss, metrics
        student = scored.measured + scored.log_probs[..., None]
        apart = coarse_kl(student, target.log_probs, direction=self.direction)
        lost = torch.where(taught, (-self.doubt * target.entropy).exp() * apart, 0.0).sum()
        metrics["distillation"] = torch.stack([lost.detach(), taught.sum().to(lost)])
        metrics["loss"] = metrics["loss"] + torch.stack([self.kl_weight * lost.detach(), taught.sum().to(lost)])
        return loss + self.kl_weight * lost / rows, metrics
