"""The objective over whole answers, which compares the answers of a prompt, and all objectives of text by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from ...core.answer_losses import dpo
from ...parts.asked import answered, asked
from ...parts.choice import Of
from ...parts.needs import needs
from ...parts.traits import whole_groups
from .distilled_objective import DistilledObjective
from .expert_objective import GuidedObjective
from .part_ratios import PartRatios
from .text_objective import ScoredTokens, TextObjective
from .token_objective import OF_TEXT, TokenObjective
from .whole_answers import WholeAnswers, answer_loss, called, counts_answers, of_answers, require_shape, try_loss

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...configs.schema import TextRecipe
    from ..controls import Controls
    from .text_policy import Completions, TextPolicy


@needs(of_answers)
@whole_groups
class AnswerObjective(TextObjective):
    """A loss of the completions of each prompt, divided by the number of prompts or of completions.

    `answer_loss` says which answers win, lose, and are right. With loss `dpo` on answers of the policy, this is online
    DPO (2402.04792). The reference is the base model. The training engine gives the log-probs of the policy that
    sampled.

    Args:
        recipe: what to do.
        policy: scores completions.
        controls: coefficients that move; this objective has none.
        loss: the loss of the answers of a prompt: it compares the best answer with the worst, predicts advantages, or
            tells right answers from wrong ones.
        drop_truncated: leave out completions that hit generation.max_tokens (DAPO).
    """

    def __init__(
        self,
        recipe: TextRecipe,
        policy: TextPolicy,
        controls: Controls | None = None,
        *,
        loss: Annotated[Callable[..., Tensor], Of("answer loss", "dpo")] = dpo,
        drop_truncated: bool = False,
    ) -> None:
        super().__init__(recipe, policy)
        self.loss = loss
        self._each = counts_answers(loss)
        self._compared = recipe.advantage is None or recipe.advantage.get("baseline") != "none"
        self._drift: Tensor | None = None

    def measure(self, experience: Completions, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """The sum and the number of the log-ratios of answers to the prompts of others, if the loss asks for drift.

        Each answer of the part is read behind the next prompt of the part. Nothing in such an answer was chosen for its
        prompt, so the mean log-ratio is a measure of the KL to the reference (KTO, arXiv 2402.01306, §4.1).
        """
        if "drift" not in asked(self.loss):
            return None
        sums, (low, high) = torch.zeros(2, device=self.policy.device), experience.part(part)
        if high - low < 2:
            return sums
        owner, counted = experience.prompt_of_sample, self._counted(experience, keep).tolist()
        first = {prompt: row for row, prompt in reversed(list(enumerate(owner)))}
        after = {prompt: low + (prompt + 1 - low) % (high - low) for prompt in range(low, high)}
        others = [experience.context(first[after.get(prompt, prompt)]) for prompt in owner]
        moved = replace(experience, contexts=others)
        for batch in self.batches(moved, part, keep):
            with torch.no_grad():
                log_probs, mask = self.policy.log_probs(moved, batch)
                with self.policy.reference():
                    gained = log_probs - self.policy.log_probs(moved, batch)[0]
            mine = torch.tensor([counted[row] for row in batch], device=mask.device)
            mask = mask & mine[:, None] & experience.trained(batch).to(mask.device)
            sums += torch.stack([torch.where(mask, gained, 0.0).sum(), mine.sum().to(sums)])
        return sums

    def settle(self, sums: Tensor) -> None:
        """The mean of what `measure` has added up, over all processes; at least 0, as a KL is."""
        self._drift = (sums[0] / sums[1].clamp(min=1)).clamp(min=0)

    def rows(self, experience: Completions, part: int, keep: Tensor | None) -> int:
        """How many prompts a part has; for a loss with one value per answer, how many completions."""
        mine = [row for rows in self.batches(experience, part, None) for row in rows]
        if self._each:
            return int(self._counted(experience, keep)[mine].sum())
        return len({experience.prompt_of_sample[row] for row in mine})

    def batches(self, experience: Completions, part: int, keep: Tensor | None) -> Iterator[list[int]]:
        """Batches of whole groups.

        Raises:
            ValueError: a group has more tokens than a batch may have.
        """
        groups, counted = experience.groups, self._scored_ones(experience) or experience.counted
        trained = torch.ones(len(groups), dtype=torch.bool) if counted is None else torch.tensor(counted)
        for batch in super().batches(experience, part, keep):
            whole = int((torch.isin(groups, groups[batch]) & trained).sum())
            if whole != len(batch):
                raise ValueError(
                    f"objective answers compares the {whole} completions of a prompt, which have more tokens than "
                    f"rollout.tokens {self.recipe.rollout.tokens} allows; raise rollout.tokens, or lower rollout.group "
                    "or generation.max_tokens"
                )
            yield batch

    def _loss(self, experience: Completions, scored: ScoredTokens, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mask = scored.mask

        def whole(log_probs: Tensor) -> Tensor:
            return torch.where(mask, log_probs, 0.0).sum(1)

        answers = WholeAnswers(
            whole(scored.log_probs), whole(scored.old), mask.sum(1), mask.any(1), scored.advantage,
            experience.groups[scored.batch].to(mask.device), lambda: whole(self._reference(experience, scored)),
            experience.drawn, self._drift, self._compared,
        )  # fmt: skip
        loss, metrics = answer_loss(self.loss, answers)
        if self._drift is not None:
            metrics["drift"] = torch.stack([self._drift, torch.ones_like(self._drift)])
        return loss / rows, metrics


TEXT_OBJECTIVES: dict[str, type[TextObjective]] = {
    "tokens": TokenObjective,
    "answers": AnswerObjective,
    "distilled": DistilledObjective,
    "guided": GuidedObjective,
}
"""`objective(recipe, policy, controls, *, ...)`: a class with the methods of `TextObjective`."""


def tried(recipe: TextRecipe) -> None:
    """Call the chosen parts of a recipe once, on two answers of one token each, so that they can refuse their options.

    Raises:
        ValueError: options are out of range or do not fit together, or a part does not return what it should.
    """
    objective, nothing, column = recipe.objective, torch.zeros(2), torch.zeros(2, 1)
    if (surrogate := objective.get("surrogate")) is not None:
        PartRatios(str(objective.get("level")), str(objective.get("reduce")), surrogate.make())
    if (correction := objective.get("correction")) is not None:
        found = correction.make(engine=recipe.generation.engine)(column)
        if found is not None:
            for one in found:
                require_shape(one, (2, 1), correction, "None, or a weight and a bool for each token")
    if (loss := objective.get("loss")) is not None:
        try_loss(loss)
    columns = dict.fromkeys(OF_TEXT, column) | {"mask": torch.ones(2, 1, dtype=torch.bool), "adv": nothing}
    for penalty in recipe.penalties:
        require_shape(answered(penalty.make(), called(columns)), (2, 1), penalty, "one value for each token")
