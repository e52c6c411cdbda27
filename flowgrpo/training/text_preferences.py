"""Losses of whole answers that compare those of one prompt: preferences, regression, and right against wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..configs.schema import TextRecipe
from ..core.preferences import dpo, group_regression, pairs_of, real, simpo
from .text_objective import Scored, TokenObjective
from .text_policy import Completions, TextPolicy

FORMS: dict[str, Callable[..., Tensor]] = {"dpo": dpo, "simpo": simpo, "regression": group_regression, "real": real}


class AnswerObjective(TokenObjective):
    """A form of `core.preferences` on the completions of each prompt, divided by the number of prompts.

    Winner and loser of a prompt are its answers of highest and lowest advantage; a prompt whose answers are all equal
    adds nothing. DPO compares with the base model, regression and REAL with the policy that sampled.

    Raises:
        ValueError: a hyper-parameter that the form does not have.
    """

    def __init__(self, recipe: TextRecipe, policy: TextPolicy) -> None:
        super().__init__(recipe, policy)
        self.form, self.options = recipe.objective.form, recipe.objective.form_options
        known = [n for n, p in inspect.signature(FORMS[self.form]).parameters.items() if p.kind is p.KEYWORD_ONLY]
        for name in self.options:
            if name not in known:
                raise ValueError(
                    f"objective.form_options has {name!r}, which form {self.form} does not take; it takes "
                    f"{', '.join(known)}"
                )

    def rows(self, experience: Completions, part: int, keep: Tensor | None) -> int:
        """Prompts of a part; for regression its completions."""
        mine = [row for rows in self.batches(experience, part, None) for row in rows]
        if self.form == "regression":
            return int(self._counted(experience, keep)[mine].sum())
        return len({experience.prompt_of_sample[row] for row in mine})

    def batches(self, experience: Completions, part: int, keep: Tensor | None) -> Iterator[list[int]]:
        """Whole groups.

        Raises:
            ValueError: a group that is longer than the token budget.
        """
        groups = experience.groups
        for batch in super().batches(experience, part, keep):
            whole = int(torch.isin(groups, groups[batch]).sum())
            if whole != len(batch):
                raise ValueError(
                    f"objective.form {self.form} compares the {whole} completions of a prompt, which are more than "
                    f"rollout.tokens {self.recipe.rollout.tokens} takes at once; raise it, or lower rollout.group or "
                    "generation.max_tokens"
                )
            yield batch

    def _loss(self, experience: Completions, scored: Scored, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        counted = scored.mask.any(1)
        groups = experience.groups[scored.batch].to(counted.device)
        whole = torch.where(scored.mask, scored.log_probs, 0.0).sum(1)
        lengths = scored.mask.sum(1).clamp(min=1)
        metrics: dict[str, Tensor] = {}
        if self.form in ("dpo", "simpo"):
            ranked = scored.advantage.masked_fill(~counted, torch.nan)
            pairs = pairs_of(ranked, groups)
            metrics["pairs"] = whole.new_tensor([len(pairs), len(groups.unique())])
            against: Any = lengths if self.form == "simpo" else self._reference(experience, scored)
            losses = FORMS[self.form](whole, against, pairs, **self.options)
        else:
            mine = counted.nonzero().flatten()
            before = torch.where(scored.mask, scored.old, 0.0).sum(1)
            ratio = (whole - before) / lengths
            advantage, own = scored.advantage[mine], groups[mine]
            if self.form == "regression":
                losses = group_regression(whole[mine], before[mine], advantage, own, **self.options)
            else:
                losses = FORMS["real"](ratio[mine], advantage > 0, own, **self.options)
        loss = losses.sum() / rows + 0.0 * whole.sum()
        metrics["loss"] = torch.stack([losses.detach().sum(), losses.new_tensor(len(losses))])
        return loss, metrics

    def _held(self, experience: Completions, scored: Scored) -> Tensor:
        """None: these losses have no bound."""
        return torch.zeros_like(scored.mask)

    def _reference(self, experience: Completions, scored: Scored) -> Tensor:
        """[R] summed log-probs of the base model."""
        with torch.no_grad(), self.policy.reference():
            found = self.policy.log_probs(experience, scored.batch)[0]
        return torch.where(scored.mask, found, 0.0).sum(1)
