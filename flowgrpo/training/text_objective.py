"""The objective over the tokens of completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..configs.schema import TextRecipe
from ..core.diagnostics import step_statistics
from ..core.guards import ALIGNMENTS, confident_rows, conflict_weights, likelihood_guard
from ..core.objectives import held_columns, kl, policy_loss
from ..core.offpolicy import r2vpo, ratio_variance
from ..core.surrogates import per_column
from ..text.scoring import right_padded
from .balance import Balance
from .controls import Controls
from .objectives import Outcome
from .planning import bound_surrogate
from .text_parts import PartRatios, units_of
from .text_policy import STRETCHES, Completions, TextPolicy


@dataclass(frozen=True)
class Scored:
    """A batch of R completions, by the training engine.

    Attributes:
        batch: R rows of the rollout.
        log_probs: [R, T] with gradient.
        old: [R, T] before the weights moved.
        mask: [R, T] bool, tokens that count.
        gap: [R, T] of `old` to the sampler's, 0 where nothing counts.
        advantage: [R], or [R, T] where tokens have their own.
        entropy: [R, T] with gradient, where the recipe steers it.
        weight: [R, T] of tokens, where the recipe leaves some out or stresses some.
    """

    batch: list[int]
    log_probs: Tensor
    old: Tensor
    mask: Tensor
    gap: Tensor
    advantage: Tensor
    entropy: Tensor | None = None
    weight: Tensor | None = None


class TokenObjective:
    """The ratio of the tokens: a surrogate, a level and a reduction of `core`.

    Args:
        recipe: what to do.
        policy: scores.
        controls: coefficients that move; none do if left out.
    """

    def __init__(self, recipe: TextRecipe, policy: TextPolicy, controls: Controls | None = None) -> None:
        self.recipe, self.policy = recipe, policy
        self.controls = controls or Controls(recipe.objective)
        objective = recipe.objective
        self.surrogate = bound_surrogate(objective.surrogate, objective.options)
        self.balance = None if objective.balance is None else Balance(objective.balance)
        self.parts = PartRatios(objective, self.surrogate)
        self._moved = False
        self.correction = correction_of(recipe)
        self.several = recipe.optimizer.updates * recipe.optimizer.epochs > 1
        self._before: dict[int, Tensor] = {}

    def prepare(self, experience: Completions) -> None:
        """Log-probs before the weights move, by the training engine, where several updates will need them."""
        self._before, self._moved = {}, False
        self.parts.forget()
        if self.controls.variance is not None:
            self.surrogate = partial(r2vpo, lam=self.controls.variance.value)
        if not self.several:
            return
        with torch.no_grad():
            for part in range(experience.updates):
                for rows in self.batches(experience, part, None):
                    found = self.policy.statistics(experience, rows, entropy=self.parts.guided)
                    self._before |= dict(zip(rows, found.log_probs))
                    self.parts.remember(rows, found.entropy)

    def measure(self, experience: Completions, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """Contributions of tokens to the gradient under each pair of bounds, where the recipe searches them.

        From the second optimizer step of a rollout on, that takes another pass over its completions. Where the clip
        follows the entropy of parts, sum and number of the entropies of the step's tokens.
        """
        if self.parts.guided:
            counted = self._counted(experience, keep)
            mine = [row for rows in self.batches(experience, part, keep) for row in rows if counted[row]]
            return self.parts.entropies(experience.lengths, mine, self.policy.device)
        if self.balance is None:
            return None
        moved, self._moved = self._moved, True
        total = self.balance.nothing(self.policy.device)
        for batch in self.batches(experience, part, keep):
            if moved:
                with torch.no_grad():
                    scored = self._scored(experience, batch, advantages, keep)
                log_ratio, mask = scored.log_probs - scored.old, scored.mask
            else:  # before the weights move every ratio is 1
                lengths = experience.lengths[batch] * self._counted(experience, keep)[batch]
                mask = (torch.arange(int(experience.lengths[batch].max())) < lengths[:, None]).to(total.device)
                log_ratio = torch.zeros_like(mask, dtype=torch.float32)
            advantage = per_column(advantages[batch])[:, : mask.shape[1]]
            total += self.balance.contributions(log_ratio, advantage, mask)
        return total

    def settle(self, sums: Tensor) -> None:
        """Take the bounds that the contributions ask for, or the mean entropy."""
        if self.parts.guided:
            return self.parts.settle(sums)
        assert self.balance is not None
        self.balance.settle(sums)
        self.surrogate = self.balance.surrogate

    def rows(self, experience: Completions, part: int, keep: Tensor | None) -> int:
        """What the loss of a part is divided by on this rank: its tokens, its completions, or with `constant` those
        times the longest length."""
        objective, counted = self.recipe.objective, self._counted(experience, keep)
        mine = [row for rows in self.batches(experience, part, None) for row in rows if counted[row]]
        if objective.reduce == "token":
            return sum(len(experience.sampled.ids[row]) for row in mine)
        return len(mine) * (self.recipe.generation.max_tokens if objective.constant else 1)

    def batches(self, experience: Completions, part: int, keep: Tensor | None) -> Iterator[list[int]]:
        """Completions scored together: as many of whole groups as the token budget takes, one group cut if it must.

        What is left out still belongs to its batch, so that a batch is the same whatever is selected.
        """
        low, high = experience.part(part)
        groups: dict[int, list[int]] = {}
        for row, prompt in enumerate(experience.prompt_of_sample):
            if low <= prompt < high:
                groups.setdefault(prompt, []).append(row)
        budget, batch = self.recipe.rollout.tokens, list[int]()
        for rows in groups.values():
            if batch and self._size(experience, batch + rows) > budget:
                yield batch
                batch = []
            if self._size(experience, rows) <= budget:
                batch = batch + rows
                continue
            count = max(budget // self._size(experience, rows[:1], len(rows)), 1)
            yield from (rows[k : k + count] for k in range(0, len(rows), count))
        if batch:
            yield batch

    def _size(self, experience: Completions, rows: Sequence[int], of: int = 1) -> int:
        """Tokens of a batch of completions with their prompts, padding included; `of` rows take the longest's."""
        longest = max(len(experience.sampled.ids[row]) for row in rows)
        head = max(len(experience.prompts[experience.prompt_of_sample[row]]) for row in rows)
        return len(rows) * (head + longest)

    def _counted(self, experience: Completions, keep: Tensor | None) -> Tensor:
        return experience.outcomes if keep is None else experience.outcomes & keep

    def backward(
        self, experience: Completions, batch: list[int], advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one batch of completions."""
        scored = self._scored(experience, batch, advantages, keep)
        loss, metrics = self._loss(experience, scored, rows)
        self.policy.weights.backward(loss)
        mask, old, device = scored.mask, scored.old, self.policy.device
        count = mask.sum().float()
        metrics["sampler_gap"] = torch.stack([scored.gap.abs().sum(), count])
        metrics["entropy"] = torch.stack([-torch.where(mask, old, 0.0).sum(), count])
        ratio = torch.where(mask, (scored.log_probs - old).detach(), 0.0)
        width = -(-self.recipe.generation.max_tokens // STRETCHES)
        stretch = torch.arange(mask.shape[1], device=device)[None, :] // width
        statistics = step_statistics(
            ratio, stretch, per_column(scored.advantage), mask, self._held(experience, scored), num_steps=STRETCHES
        )  # fmt: skip
        return Outcome(statistics.cpu(), metrics, ratio.abs().max().cpu())

    def _scored(self, experience: Completions, batch: list[int], advantages: Tensor, keep: Tensor | None) -> Scored:
        settings = self.recipe.objective
        wanted = self.controls.entropy is not None or settings.confident is not None
        found = self.policy.statistics(experience, batch, entropy=wanted)
        log_probs, mask = found.log_probs, found.mask
        mask = mask & self._counted(experience, keep)[batch].to(mask.device)[:, None]
        old = torch.stack([self._before[row] for row in batch]) if self._before else log_probs.detach()
        sampler = right_padded_values([experience.sampled.log_probs[row] for row in batch], mask.device)
        gap = torch.where(mask, old - sampler, 0.0)
        advantage, weight = advantages[batch], None
        if advantage.dim() == 2:
            advantage = advantage[:, : mask.shape[1]]
        if settings.conflict is not None:
            weight = self._conflicts(experience, batch, advantages, settings.conflict)[:, : mask.shape[1]]
        if settings.confident is not None and found.entropy is not None:
            sure = confident_rows(found.entropy.detach(), mask, settings.confident).float()[:, None].expand_as(mask)
            weight = sure if weight is None else weight * sure
        return Scored(batch, log_probs, old, mask, gap, advantage, found.entropy, weight)

    def _conflicts(self, experience: Completions, batch: list[int], advantages: Tensor, boost: float) -> Tensor:
        """[R, T] weights by the whole groups of a batch, of which it may hold a part."""
        groups = experience.groups
        rows = torch.isin(groups, groups[batch]).nonzero().flatten().tolist()
        device = self.policy.device
        ids, mask = right_padded([experience.sampled.ids[row] for row in rows], 0, device)
        of = groups[rows].to(device)
        first, last = (
            conflict_weights(ids, advantages[rows], of, mask, boost=boost, align=align) for align in ALIGNMENTS
        )
        # A token in conflict from both ends is so but once.
        found = torch.where(first.minimum(last) == 0, 0.0, first.maximum(last))
        return found[[rows.index(row) for row in batch]]

    def _loss(self, experience: Completions, scored: Scored, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch over the `rows` of the optimizer step, and metrics as [sum, count]."""
        objective, mask = self.recipe.objective, scored.mask
        penalties = self._penalties(experience, scored)
        penalty = torch.stack([factor * value for factor, value in penalties.values()]).sum(0) if penalties else None
        correction, count = self._correction(scored), mask.sum().float()
        surrogate, shares = self._by_part(experience, scored)
        weights = [one for one in (correction, scored.weight, shares) if one is not None]
        weight = torch.stack(weights).prod(0) if weights else None
        # A part's share of the row is a weight.
        reduce = "sequence" if objective.reduce == "part" else objective.reduce
        loss, metrics = policy_loss(
            scored.log_probs, scored.old, scored.advantage, mask, surrogate=surrogate, level=self._level,
            weight=weight, penalty=penalty, reduce=reduce, denom=rows,
        )  # fmt: skip
        if correction is not None:
            cut = torch.where(mask, (correction == 0) | (correction >= objective.correction_cap), False)
            metrics["correction_cut"] = torch.stack([cut.sum().float(), count])
        for name, (_, value) in penalties.items():
            metrics[name] = torch.stack([torch.where(mask, value.detach(), 0.0).sum(), count])
        if self.balance is not None:
            metrics |= self.balance.metrics(count)
        if self.controls.variance is not None:
            metrics["ratio_variance"] = ratio_variance(scored.log_probs - scored.old, mask)
        return loss, metrics

    @property
    def _level(self) -> str:
        """What the loss pools by itself: the ratio of a part is a surrogate of tokens."""
        return "token" if self.recipe.objective.level == "part" else self.recipe.objective.level

    def _held(self, experience: Completions, scored: Scored) -> Tensor:
        """[R, T] bool: tokens without a gradient because of a bound."""
        surrogate, _ = self._by_part(experience, scored)
        return held_columns(
            scored.log_probs, scored.old, scored.advantage, scored.mask, surrogate=surrogate, level=self._level
        )

    def _by_part(self, experience: Completions, scored: Scored) -> tuple[Callable[..., Tensor], Tensor | None]:
        """The surrogate of a batch, and [R, T] weights of its tokens, as the recipe has them by parts."""
        if not self.parts.asked:
            return self.surrogate, None
        units = units_of(experience, scored.batch, scored.mask.device)
        return self.parts.surrogate(self.surrogate, units, scored.batch), self.parts.weight(units, scored.mask)

    def _penalties(self, experience: Completions, scored: Scored) -> dict[str, tuple[float, Tensor]]:
        """Factor and [R, T] of what is added to the loss, by the name of its metric."""
        objective, found = self.recipe.objective, dict[str, tuple[float, Tensor]]()
        if objective.kl:
            with torch.no_grad(), self.policy.reference():
                reference = self.policy.log_probs(experience, scored.batch)[0]
            found["kl"] = objective.kl, kl(scored.log_probs, reference, objective.kl_kind)
        if objective.llds:
            good = scored.advantage if objective.llds_rows == "good" else None
            found["llds"] = objective.llds, likelihood_guard(scored.log_probs, scored.old, scored.mask, good)
        if self.controls.entropy is not None and scored.entropy is not None:
            found["exact_entropy"] = -self.controls.entropy.value, scored.entropy
        return found

    def _correction(self, scored: Scored) -> Tensor | None:
        """[R, T] importance weight of the training engine over the sampler; None without a correction."""
        objective = self.recipe.objective
        if self.correction == "none":
            return None
        return engine_weight(
            scored.gap, level=self.correction, how=objective.correction_how, cap=objective.correction_cap,
            floor=objective.correction_floor,
        )  # fmt: skip


def correction_of(recipe: TextRecipe) -> str:
    """`none`, `token` or `sequence`: what corrects for the engine that samples."""
    objective = recipe.objective
    if objective.correction != "auto":
        return objective.correction
    return "none" if recipe.generation.engine == "transformers" or objective.form != "tokens" else "token"


def engine_weight(gap: Tensor, *, level: str, how: str, cap: float, floor: float = 0.0) -> Tensor:
    """Bounded importance weight of the training engine over the engine that sampled.

    Truncated as in TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"), or
    masked as in IcePop (Ring-1T, arXiv 2510.18855).

    Args:
        gap: [R, T] log-probs of the training engine less those of the sampler, 0 where nothing counts.
        level: `token`, or `sequence` for one weight of a whole row, the product of its tokens'.
        how: `truncate` takes the cap for what is above it, `mask` 0 for what is above it or below the floor.
        cap: largest weight.
        floor: smallest weight that is not masked.

    Returns:
        [R, T] weights without gradient.
    """
    whole = gap.detach() if level == "token" else gap.detach().sum(1, keepdim=True).expand_as(gap)
    ratio = whole.clamp(max=20.0).exp()
    if how == "mask":
        return torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0)
    return ratio.clamp(max=cap)


def right_padded_values(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """[B, T] of ragged rows, 0 after their ends."""
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [0.0] * (width - len(row)) for row in rows], device=device)
