"""What the objectives over completions have in common: batches, log-probs, statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.diagnostics import step_statistics
from ...core.surrogates import per_column, require_gradient
from ...text.scoring import Measure, Statistics, right_padded_values
from ..losses.objective import Outcome

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...configs.schema import TextRecipe
    from .text_policy import Completions, TextPolicy


@dataclass(frozen=True)
class ScoredTokens:
    """A batch of R completions, scored by the training engine.

    Attributes:
        batch: R rows of the rollout.
        log_probs: [R, T] with a gradient.
        old: [R, T] log-probs before the weights moved.
        mask: [R, T] bool, tokens that count.
        gap: [R, T] `old` minus the log-probs of the sampler, 0 for tokens that do not count.
        advantage: [R], or [R, T] where tokens have advantages of their own.
        entropy: [R, T] with a gradient; None if the recipe does not use it.
        weight: [R, T] weights of tokens; None if all tokens have the same weight.
        measured: [R, T, ...] what the objective measures of each token; None if it measures nothing.
    """

    batch: list[int]
    log_probs: Tensor
    old: Tensor
    mask: Tensor
    gap: Tensor
    advantage: Tensor
    entropy: Tensor | None = None
    weight: Tensor | None = None
    measured: Tensor | None = None


def batches_of(
    experience: Completions, part: int, budget: int, scored: Sequence[bool] | None = None
) -> Iterator[list[int]]:
    """Completions that are scored together: as many whole groups as fit into a budget of tokens.

    A group is cut only if it alone is larger than the budget. Completions that are not trained stay in their batch, so
    a selection does not change the batches. Completions that a form has made for their scores alone are in no batch.

    Args:
        experience: the rollout.
        part: number of the part of the rollout.
        budget: tokens of a batch, with padding.
        scored: whether each completion is in a batch; if left out, those that count for a form are.
    """
    scored = experience.counted if scored is None else scored
    low, high = experience.part(part)
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(experience.prompt_of_sample):
        if low <= prompt < high and (scored is None or scored[row]):
            groups.setdefault(prompt, []).append(row)
    batch, widths = list[int](), (0, 0)
    for rows in groups.values():
        own = _widths(experience, rows)
        both = max(widths[0], own[0]), max(widths[1], own[1])
        if batch and (len(batch) + len(rows)) * sum(both) > budget:
            yield batch
            batch, both = [], own
        if len(rows) * sum(own) <= budget:
            batch, widths = batch + rows, both
            continue
        count = max(budget // sum(_widths(experience, rows[:1])), 1)
        yield from (rows[k : k + count] for k in range(0, len(rows), count))
        widths = (0, 0)
    if batch:
        yield batch


@torch.no_grad()
def statistics_of(
    policy: TextPolicy, experience: Completions, *, entropy: bool = False
) -> Iterator[tuple[list[int], Statistics]]:
    """The statistics of all completions by the policy of now, batch by batch and without a gradient.

    Args:
        policy: scores.
        experience: the rollout; all of its parts are scored.
        entropy: whether the statistics have entropies.

    Yields:
        The rows of a batch, and their statistics.
    """
    for part in range(experience.updates):
        for rows in batches_of(experience, part, policy.recipe.rollout.tokens):
            yield rows, policy.statistics(experience, rows, entropy=entropy)


def _widths(experience: Completions, rows: Sequence[int]) -> tuple[int, int]:
    """The tokens of the longest prompt and of the longest completion: what a row of a batch takes, with padding."""
    longest = max(len(experience.sampled.ids[row]) for row in rows)
    return max(len(experience.context(row)) for row in rows), longest


class TextObjective(ABC):
    """The base class of objectives of completions: batches, log-probs, statistics.

    A subclass gives `rows` and `_loss`, and says with `entropy_before` and `entropy_now` which entropies it needs.

    Args:
        recipe: what to do.
        policy: scores completions.
    """

    entropy_before = entropy_now = False

    def __init__(self, recipe: TextRecipe, policy: TextPolicy) -> None:
        self.recipe, self.policy = recipe, policy
        self.several = recipe.optimizer.updates * recipe.optimizer.epochs > 1
        self._before: dict[int, Tensor] = {}

    def prepare(self, experience: Completions) -> None:
        """Keep the training engine's log-probs before the weights move, if they will be needed."""
        self._before = {}
        if not (self.several or self.entropy_before):
            return
        with torch.no_grad():
            for part in range(experience.updates):
                for rows in self.batches(experience, part, None):
                    found = self.policy.statistics(experience, rows, entropy=self.entropy_before)
                    self._before |= dict(zip(rows, found.log_probs))
                    self._prepared(rows, found.entropy)

    # Only some objectives override the empty methods below.
    def _prepared(self, rows: list[int], entropy: Tensor | None) -> None:  # noqa: B027
        """Take the entropies [R, T] of some completions before the weights move."""

    def measure(self, experience: Completions, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """None: nothing is measured."""
        return None

    def settle(self, sums: Tensor) -> None:  # noqa: B027
        """Never called, because nothing is measured."""

    @abstractmethod
    def rows(self, experience: Completions, part: int, keep: Tensor | None) -> int:
        """This rank's share of the number that divides the loss of a part."""

    def batches(self, experience: Completions, part: int, keep: Tensor | None) -> Iterator[list[int]]:
        """Completions that are scored together, see `batches_of`."""
        return batches_of(experience, part, self.recipe.rollout.tokens, self._scored_ones(experience))

    def _scored_ones(self, experience: Completions) -> Sequence[bool] | None:
        """[B] whether the objective scores each completion; None for all that count."""
        return None

    def _counted(self, experience: Completions, keep: Tensor | None) -> Tensor:
        return experience.outcomes if keep is None else experience.outcomes & keep

    def backward(
        self, experience: Completions, batch: list[int], advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one batch of completions."""
        scored = self._scored(experience, batch, advantages, keep)
        loss, metrics = self._loss(experience, scored, rows)
        require_gradient(f"objective {type(self).__name__}", loss, "`scored.log_probs`")
        self.policy.weights.backward(loss)
        mask, old, device = scored.mask, scored.old, self.policy.device
        count = mask.sum().float()
        if experience.drawn:
            metrics["sampler_gap"] = torch.stack([scored.gap.abs().sum(), count])
        metrics["entropy"] = torch.stack([-torch.where(mask, old, 0.0).sum(), count])
        ratio = torch.where(mask, (scored.log_probs - old).detach(), 0.0)
        width = -(-self.recipe.generation.max_tokens // experience.columns)
        # A form may add tokens of its own to a completion. What is longer than max_tokens counts in the last stretch.
        stretch = (torch.arange(mask.shape[1], device=device)[None, :] // width).clamp(max=experience.columns - 1)
        statistics = step_statistics(
            ratio, stretch, per_column(scored.advantage), mask, self._held(experience, scored),
            num_steps=experience.columns,
        )  # fmt: skip
        return Outcome(statistics.cpu(), metrics, ratio.abs().max().cpu())

    def _measure(self, experience: Completions, batch: list[int]) -> Measure | None:
        """What is measured of the tokens of a batch beside their log-probs; None for nothing."""
        return None

    def _scored(
        self, experience: Completions, batch: list[int], advantages: Tensor, keep: Tensor | None
    ) -> ScoredTokens:
        measure = self._measure(experience, batch)
        found = self.policy.statistics(experience, batch, entropy=self.entropy_now, measure=measure)
        log_probs, mask = found.log_probs, found.mask
        mask = mask & (self._counted(experience, keep)[batch, None] & experience.trained(batch)).to(mask.device)
        old = torch.stack([self._before[row] for row in batch]) if self._before else log_probs.detach()
        sampler = right_padded_values([experience.sampled.log_probs[row] for row in batch], mask.device)
        gap = torch.where(mask, old - sampler, 0.0)
        advantage = advantages[batch]
        if advantage.dim() == 2:
            advantage = advantage[:, : mask.shape[1]]
        return ScoredTokens(
            batch, log_probs, old, mask, gap, advantage, found.entropy, measured=found.measured
        )  # fmt: skip

    @abstractmethod
    def _loss(self, experience: Completions, scored: ScoredTokens, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch over the `rows` of the optimizer step, and metrics as [sum, count]."""

    def _held(self, experience: Completions, scored: ScoredTokens) -> Tensor:
        """[R, T] bool: tokens that have no gradient because of a bound; all False if there is no bound."""
        return torch.zeros_like(scored.mask)

    def _reference(self, experience: Completions, scored: ScoredTokens) -> Tensor:
        """[R, T] log-probs under the reference."""
        with torch.no_grad(), self.policy.reference():
            return self.policy.log_probs(experience, scored.batch)[0]
