"""Completions of a causal language model as a task of the one loop: rollouts, and the objective over their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ..configs.schema import GenerationConfig, TextRecipe
from ..core.diagnostics import step_statistics
from ..core.objectives import kl, policy_loss
from ..pipelines.policy import part_of
from ..rewards.runner import RewardBatch
from ..text.model import LanguageModel, LanguageWeights
from ..text.sampling import Sampled, completion_keys, sample_completions
from ..text.scoring import completion_log_probs
from .checkpoint import Stateful
from .clock import Clock
from .data import PromptRow
from .objectives import Objective, Outcome
from .planning import bound_surrogate, clip_of
from .tasks import PolicyTask, trained_numbers

STRETCHES = 8
"""Parts of equal length of the longest completion, by which the drift of the ratio is reported."""


@dataclass(frozen=True)
class Completions:
    """B sampled completions of P prompts.

    Attributes:
        prompts: P lists of token ids.
        sampled: ids, log-probs under the sampler, and whether each ended.
        samples: B texts.
        prompt_of_sample: [B], rising.
        updates: how many parts of whole prompts the rollout is cut into.
        drop_truncated: whether completions that did not end are left out.
        replayed: how many are past successes in the place of failures.
    """

    prompts: list[list[int]]
    sampled: Sampled
    samples: list[str]
    prompt_of_sample: list[int]
    updates: int = 1
    drop_truncated: bool = False
    replayed: int = 0
    columns: int = field(default=STRETCHES, init=False)

    @cached_property
    def groups(self) -> Tensor:
        """[B] prompts."""
        return torch.tensor(self.prompt_of_sample)

    @cached_property
    def lengths(self) -> Tensor:
        """[B] tokens, the ending one included."""
        return torch.tensor([len(ids) for ids in self.sampled.ids])

    @cached_property
    def outcomes(self) -> Tensor:
        """[B] bool: completions that count."""
        ended = torch.tensor(self.sampled.ended)
        return ended if self.drop_truncated else torch.ones_like(ended)

    def node_advantages(self, leaf: Tensor) -> Tensor:
        """The advantages as they are: a completion is its own node."""
        return leaf

    def siblings(self, among: str) -> Tensor:
        """The groups."""
        return self.groups

    def kept(self, chosen: Tensor) -> Tensor:
        """The chosen."""
        return chosen

    def record(self) -> dict[str, float]:
        """Tokens sampled, mean length, and the share that was cut at the longest length."""
        lengths, ended = self.lengths.float(), torch.tensor(self.sampled.ended)
        return {
            "tokens": float(lengths.sum()),
            "length": float(lengths.mean()),
            "truncated": float((~ended).float().mean()),
            **({"replayed": float(self.replayed)} if self.replayed else {}),
        }


def complete(
    language: LanguageModel,
    rows: Sequence[PromptRow],
    keys: Sequence[int],
    group: int,
    settings: GenerationConfig,
    *,
    temperature: float,
    batch: int,
) -> Completions:
    """`group` completions of each prompt, as many of whole groups at a time as `batch` takes.

    Args:
        language: the model.
        rows: P prompts.
        keys: P numbers that address what is drawn for each prompt.
        group: completions of a prompt.
        settings: lengths and filters.
        temperature: 0 takes the likeliest token.
        batch: completions sampled at once.
    """
    prompts = [language.encode(row.text, row.messages) for row in rows]
    owner = [p for p in range(len(rows)) for _ in range(group)]
    seeds = completion_keys(keys, group)
    ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    ended: list[bool] = []
    size = batch // group * group if batch >= group else batch
    for k in range(0, len(owner), size):
        mine = owner[k : k + size]
        part = sample_completions(
            language, prompts[mine[0] : mine[-1] + 1], [p - mine[0] for p in mine], seeds[k : k + size],
            max_tokens=settings.max_tokens, temperature=temperature, top_k=settings.top_k, top_p=settings.top_p,
        )  # fmt: skip
        ids, log_probs, ended = ids + part.ids, log_probs + part.log_probs, ended + part.ended
    return Completions(prompts, Sampled(ids, log_probs, ended), [language.decode(one) for one in ids], owner)


class TextPolicy:
    """A language model that samples and scores.

    Args:
        language: the model.
        weights: what of it is trained.
        recipe: lengths, temperature, batches.
    """

    def __init__(self, language: LanguageModel, weights: LanguageWeights, recipe: TextRecipe) -> None:
        self.language, self.weights, self.recipe = language, weights, recipe
        self.device = next(language.model.parameters()).device
        self.reference: Callable[[], AbstractContextManager[None]] = weights.reference

    def sample(
        self, rows: Sequence[PromptRow], keys: Sequence[int], group: int, *, temperature: float, batch: int
    ) -> Completions:
        """`group` completions of each prompt, see `complete`."""
        settings = self.recipe.generation
        return complete(self.language, rows, keys, group, settings, temperature=temperature, batch=batch)

    def log_probs(self, completions: Completions, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Log-probs [R, T] of some completions and their mask, at the temperature of sampling."""
        owners = [completions.prompt_of_sample[row] for row in rows]
        known = list(dict.fromkeys(owners))
        model = self.recipe.model
        return completion_log_probs(
            self.language,
            [completions.prompts[p] for p in known],
            [completions.sampled.ids[row] for row in rows],
            [known.index(p) for p in owners],
            temperature=self.recipe.generation.temperature,
            # Recomputing activations in the backward pass has no cache to go on from.
            shared_prefix=model.shared_prefix and not model.gradient_checkpointing,
        )


class TokenObjective:
    """The ratio of the tokens: a surrogate, a level and a reduction of `core`."""

    def __init__(self, recipe: TextRecipe, policy: TextPolicy) -> None:
        self.recipe, self.policy = recipe, policy
        objective = recipe.objective
        self.surrogate = bound_surrogate(objective.surrogate, objective.options)
        self.clip = clip_of(self.surrogate)
        self.several = recipe.optimizer.updates * recipe.optimizer.epochs > 1
        self._before: dict[int, Tensor] = {}

    def prepare(self, experience: Completions) -> None:
        """Log-probs before the weights move, by the training engine, where several updates will need them."""
        self._before = {}
        if not self.several:
            return
        with torch.no_grad():
            for part in range(experience.updates):
                for rows in self.batches(experience, part, None):
                    self._before |= dict(zip(rows, self.policy.log_probs(experience, rows)[0]))

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
        low, high = part_of(len(experience.prompts), experience.updates, part)
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
        objective, device = self.recipe.objective, self.policy.device
        log_probs, mask = self.policy.log_probs(experience, batch)
        mask = mask & self._counted(experience, keep)[batch].to(device)[:, None]
        old = log_probs.detach()
        if self._before:
            old = torch.stack([self._before[row] for row in batch])
        sampler = right_padded_values([experience.sampled.log_probs[row] for row in batch], device)
        gap = torch.where(mask, old - sampler, 0.0)
        advantage = advantages[batch]
        penalty, metrics_kl = self._penalty(experience, batch, log_probs)
        loss, metrics = policy_loss(
            log_probs, old, advantage, mask, surrogate=self.surrogate, level=objective.level,
            weight=self._correction(gap, mask), penalty=penalty, reduce=objective.reduce, denom=rows,
        )  # fmt: skip
        loss.backward()
        count = mask.sum().float()
        metrics["sampler_gap"] = torch.stack([gap.abs().sum(), count])
        metrics["entropy"] = torch.stack([-torch.where(mask, old, 0.0).sum(), count])
        if metrics_kl is not None:
            metrics["kl"] = torch.stack([torch.where(mask, metrics_kl, 0.0).sum(), count])
        ratio = torch.where(mask, (log_probs - old).detach(), 0.0)
        width = -(-self.recipe.generation.max_tokens // STRETCHES)
        stretch = torch.arange(mask.shape[1], device=device)[None, :] // width
        statistics = step_statistics(ratio, stretch, advantage[:, None], mask, *self.clip, num_steps=STRETCHES)
        return Outcome(statistics.cpu(), metrics, ratio.abs().max().cpu())

    def _penalty(
        self, experience: Completions, batch: list[int], log_probs: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The KL to the reference with its factor, [R, T], and without it."""
        objective = self.recipe.objective
        if objective.kl == 0:
            return None, None
        with torch.no_grad(), self.policy.reference():
            reference = self.policy.log_probs(experience, batch)[0]
        apart = kl(log_probs, reference, objective.kl_kind)
        return objective.kl * apart, apart.detach()

    def _correction(self, gap: Tensor, mask: Tensor) -> Tensor | None:
        """Truncated importance weight of the training engine over the sampler, of a token or of the whole row."""
        objective = self.recipe.objective
        if objective.correction == "none":
            return None
        exponent = gap if objective.correction == "token" else gap.sum(1, keepdim=True).expand_as(gap)
        return exponent.clamp(max=20.0).exp().clamp(max=objective.correction_cap)


def right_padded_values(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """[B, T] of ragged rows, 0 after their ends."""
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [0.0] * (width - len(row)) for row in rows], device=device)


class TextTask(PolicyTask):
    """Completions of a causal language model.

    Args:
        recipe: what to do.
        policy: samples and scores.
    """

    noun = "texts"
    clock_parts: tuple[str, ...] = ("sampling", "scoring", "reward", "optimizer", "rest")
    update_part = "scoring"

    def __init__(self, recipe: TextRecipe, policy: TextPolicy) -> None:
        self.recipe, self.policy = recipe, policy

    @property
    def result(self) -> str:
        """`lora`, or for full weights `model`."""
        return "lora" if self.weights.kind == "lora" else "model"

    def objective(self, old: Callable[[], AbstractContextManager[None]] | None) -> Objective:
        """That of tokens."""
        return TokenObjective(self.recipe, self.policy)

    def rollout(self, rows: Sequence[PromptRow], keys: Sequence[int], iteration: int, clock: Clock) -> Completions:
        """A group of completions of each prompt."""
        recipe = self.recipe
        with clock.part("sampling"):
            found = self.policy.sample(
                rows, keys, recipe.rollout.group, temperature=recipe.generation.temperature, batch=recipe.rollout.batch
            )
        return replace(found, updates=recipe.optimizer.updates, drop_truncated=recipe.objective.drop_truncated)

    def evaluation(self, rows: Sequence[PromptRow], keys: Sequence[int], clock: Clock) -> Completions:
        """Completions at the temperature of evaluations."""
        settings = self.recipe.evaluate
        with clock.part("sampling"):
            return self.policy.sample(
                rows, keys, settings.seeds, temperature=settings.temperature,
                batch=settings.batch or self.recipe.rollout.batch,
            )  # fmt: skip

    def learn(self, experience: Completions, scores: RewardBatch) -> dict[str, float]:
        """Nothing."""
        return {}

    def credit_model(self) -> None:
        """None."""

    def parts(self) -> dict[str, Stateful]:
        """None."""
        return {}

    def describe(self) -> Iterator[str]:
        """Model, sizes and the clip."""
        recipe, optimizer = self.recipe, self.recipe.optimizer
        low, high = clip_of(bound_surrogate(recipe.objective.surrogate, recipe.objective.options))
        clip = f", clip -{low:g} +{high:g}" if high != float("inf") else ""
        steps = optimizer.updates * optimizer.epochs
        yield (
            f"{recipe.name}: {type(self.policy.language.model).__name__} ({recipe.model.path}), {recipe.model.train}, "
            f"{trained_numbers(self):,} trained parameters"
        )
        yield (
            f"{recipe.rollout.prompts} prompts × {recipe.rollout.group} completions an iteration, at most "
            f"{recipe.generation.max_tokens} tokens, {steps} optimizer step(s){clip}"
        )
        if steps == 1 and recipe.objective.surrogate == "clip":
            yield "note: one optimizer step per rollout is strictly on-policy: the ratio is 1 and the clip never binds"

    def samples_per_iteration(self) -> int:
        """Completions."""
        return self.recipe.rollout.prompts * self.recipe.rollout.group
