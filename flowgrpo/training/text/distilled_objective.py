"""The objective of distillation: the policy with more in its prompt, or another model, teaches the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from ...configs.sections import EmaConfig
from ...core.distillation import Direction, coarse_divergence, early_weights
from ...core.surrogates import clip
from ...parts.choice import Choice, Of, given_names
from ...parts.needs import Need, needs, without_effect
from ...parts.ranges import Count, Inside, NotNegative, Positive
from ...parts.traits import all_taught, offered, offering
from .frozen_teacher import frozen_teachers, shared_tokens
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
    if not offered(recipe, "teachers") and not recipe.model.teachers:
        faults.append(
            f"text objective {choice.short} distils what the policy predicts when it knows more, and nothing says what "
            "it then knows; add extension teacher, or name another model in model.teachers"
        )
    if "curvature" in given_names(choice["surrogate"].target):
        faults.append(
            f"text objective {choice.short} measures the logits of a teacher's tokens, and surrogate "
            f"{choice['surrogate'].short} measures their curvature; use another surrogate"
        )
    return faults


def _teaches_itself(recipe: TextRecipe, choice: Choice) -> list[str]:
    """Faults of a recipe: weights are chosen for a teacher that is another model, or are chosen twice."""
    asked = [name for name in ("ema", "frozen") if choice.get(name)]
    if len(asked) == 2:
        return ["objective.ema averages the teacher's weights, and objective.frozen keeps them; leave one of them out"]
    if asked and recipe.model.teachers:
        return [
            f"objective.{asked[0]} says which weights of the policy teach, and model.teachers names other models; "
            "leave one of them out"
        ]
    return []


def _samples(recipe: TextRecipe, choice: Choice) -> list[str]:
    """Faults of a recipe: weights by what the policy drew, of completions that it did not draw."""
    if not offering(recipe.rollout.form, "given"):
        return []
    faults = []
    if choice["early"] > 0:
        faults.append(
            f"objective.early weights tokens by how far the policy's own beginning is from the teacher, and form "
            f"{recipe.rollout.form.short} gives completions that the policy did not draw; leave early out"
        )
    if choice.get("bound") is None:
        return faults
    return [
        *faults,
        f"objective.bound limits how much likelier a token is than when it was drawn, and form "
        f"{recipe.rollout.form.short} gives completions that the policy did not draw; leave bound out",
    ]


def _reinforces(recipe: TextRecipe, choice: Choice) -> bool:
    """Whether the surrogate trains any completions by their rewards."""
    return bool(choice["both"]) or (choice["others"] == "policy" and not all_taught(recipe))


def _idle_without_rewards(recipe: TextRecipe, choice: Choice) -> list[str]:
    """Faults of a recipe that says how rewards train completions, where no completion is trained by its rewards."""
    if _reinforces(recipe, choice):
        return []
    why = "rewards train no completion here without `both`"
    faults = [fault] if (fault := without_effect(choice, "surrogate", why)) else []
    if recipe.penalties:
        faults.append(
            f"penalties are added to the loss of the tokens that rewards train, and with {choice.kind} {choice.short} "
            "rewards train none here; leave penalties out, or write objective.both: true"
        )
    return faults


@needs(
    of_tokens,
    _has_teacher,
    _teaches_itself,
    _samples,
    _idle_without_rewards,
    Need("objective.direction", ("jsd",), "mixes the two distributions with `beta`", unless="beta"),
)
class DistilledObjective(TokenObjective):
    """Completions that have a teacher are distilled, and a surrogate trains the others (SRPO, 2604.02288).

    The teacher is the policy itself, with the context that extension `teacher` gives a completion: a success of the
    group, feedback, or a column of the data. The teacher has the policy's weights as they are, an average of them
    (SDPO; SDFT, 2601.19897), or the weights with which the run began (OPSD, 2601.18734). The loss of a token is the KL
    between the next-token distributions of the policy and of its teacher, which has no gradient. With `others: none`
    and teachers for all completions, this is SDPO (2601.20802). A batch is divided by the number of all its tokens.

    With `model.teachers`, the teacher is another model, frozen (on-policy distillation; GKD 2306.13649). It reads the
    prompts of the policy, and teaches all completions. With extension `teacher` beside it, it reads the extension's
    contexts instead, and teaches the completions that have one. With `both`, rewards train the taught completions too
    (KDRL, 2506.02208; with the policy as its own teacher, SDPG, 2606.04036).

    Args:
        recipe: what to do.
        policy: scores completions.
        controls: coefficients that move; this objective has none.
        surrogate: the surrogate of the ratio of tokens, for completions that are trained by their rewards.
        others: whether completions without a teacher are trained by the surrogate, or not at all.
        both: whether completions with a teacher are trained by the surrogate, too. Then `weight` says how much the
            teacher counts beside the rewards.
        weight: weight of the divergence.
        direction: `reverse` is the KL of the policy from its teacher, `forward` the KL of the teacher from the policy,
            `jsd` the generalised Jensen-Shannon divergence, which lies between them and is bounded.
        beta: for `jsd`, the share of the teacher in the mixture with which both are compared (GKD, Eq. 1); 0.5 if left
            out. Near 0 the divergence is beta times the forward KL, near 1 it is 1 - beta times the reverse KL.
        top: the divergence is over so many tokens that are likeliest for the teacher, and one bin for all other tokens.
        doubt: the divergence of a token has the weight e^(-doubt H), where H is the teacher's entropy in nats. So an
            unsure teacher teaches less.
        bound: the divergence of a token has the weight min(r, bound), where r is the ratio of the token's probability
            to its probability when it was drawn (SDPO's code has 2). Without it, the weight is 1.
        early: the divergence of a token also has a weight that falls from 1 + early to 1 along a completion, as fast as
            the log-probs of its tokens under the policy and under the teacher differ (IW-OPD, 2606.22600; there 0.5).
            So what follows a beginning that the teacher would not have written counts less.
        ema: the policy teaches itself with this average of its weights.
        frozen: the policy teaches itself with the weights with which the run began.
    """

    def __init__(
        self,
        recipe: TextRecipe,
        policy: TextPolicy,
        controls: Controls | None = None,
        *,
        surrogate: Annotated[Callable[..., Tensor], Of("surrogate", "clip")] = clip,
        others: Literal["policy", "none"] = "policy",
        both: bool = False,
        weight: Positive = 1.0,
        direction: Direction = "reverse",
        beta: Inside | None = None,
        top: Count = 20,
        doubt: NotNegative = 0.0,
        bound: Positive | None = None,
        early: NotNegative = 0.0,
        ema: EmaConfig | None = None,
        frozen: bool = False,
    ) -> None:
        super().__init__(recipe, policy, controls, surrogate=surrogate)
        self.others, self.both, self.kl_weight, self.top, self.doubt = others, both, weight, top, doubt
        self._apart = partial(coarse_divergence, direction=direction, beta=0.5 if beta is None else beta)
        self._bound, self._early, self._temperature = bound, early, recipe.generation.temperature
        self._as_teacher = policy.weights.reference if frozen else policy.average or nullcontext
        self._target: Target | None = None
        self._reinforces = _reinforces(recipe, recipe.objective)
        self._teachers = frozen_teachers(policy)
        self._tokens = shared_tokens(policy.language) if self._teachers else None

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
        self._target = self._predicted(experience, batch)
        return super()._scored(experience, batch, advantages, keep)

    def _predicted(self, experience: Completions, batch: list[int]) -> Target | None:
        """What the teachers of a batch predict; None if none of its completions has a teacher."""
        contexts = self._contexts(experience)
        if not self._teachers:
            with self._as_teacher():
                return predicted(self.policy, experience, contexts, batch, self.top, entropy=self.doubt > 0)
        of_rows = [experience.taught_by[prompt] for prompt in experience.prompt_of_sample]
        found: Target | None = None
        for name, teacher in self._teachers.items():
            own = [context if of == name else None for context, of in zip(contexts, of_rows)]
            target = predicted(teacher, experience, own, batch, self.top, entropy=self.doubt > 0, tokens=self._tokens)
            if target is not None:
                found = target if found is None else found.beside(target)
        return found

    def _contexts(self, experience: Completions) -> Sequence[list[int] | None]:
        """What the teacher of each completion reads before it; None for a completion without a teacher."""
        if self._teachers and experience.teachers is None:
            return [experience.context(row) for row in range(len(experience.samples))]
        return teachers_of(experience)

    def _measure(self, experience: Completions, batch: list[int]) -> Measure | None:
        return None if self._target is None else partial(self._target.gaps, temperature=self._temperature)

    def _loss(self, experience: Completions, scored: ScoredTokens, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        target, mask = self._target, scored.mask
        taught = torch.zeros_like(mask) if target is None else mask & target.taught[:, None]
        rest = mask & ~taught if self.others == "policy" else torch.zeros_like(mask)
        rest = rest | taught if self.both else rest
        loss, metrics = super()._loss(experience, replace(scored, mask=rest), rows)
        if not self._reinforces:
            # No token has a ratio that counts, and a mean over none would be reported as lost.
            metrics = {"loss": metrics["loss"]}
        if target is None or scored.measured is None:
            return loss, metrics
        student = scored.measured + scored.log_probs[..., None]
        each = self._apart(student, target.log_probs)
        if target.entropy is not None:
            each = (-self.doubt * target.entropy).exp() * each
        if self._bound is not None:
            each = each * (scored.log_probs - scored.old).detach().exp().clamp(max=self._bound)
        if self._early:
            each = early_weights(target.own - scored.old, taught, gamma=self._early) * each
        lost = torch.where(taught, each, 0.0).sum()
        metrics["distillation"] = torch.stack([lost.detach(), taught.sum().to(lost)])
        metrics["loss"] = metrics["loss"] + torch.stack([self.kl_weight * lost.detach(), taught.sum().to(lost)])
        return loss + self.kl_weight * lost / rows, metrics
