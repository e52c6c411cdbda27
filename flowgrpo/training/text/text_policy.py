"""A causal language model as a policy: it samples completions, and the training engine gives their log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...configs.schema import TextRecipe
from ...configs.text_recipe import GenerationConfig
from ...pipelines.experience import part_bounds
from ...rewards.base import NOISE_KEY, OF_GIVEN
from ...text.cutting import CUTS, Parts, cut_completions
from ...text.pictured import identity
from ...text.sampling import Sampled, Sampler, completion_keys, sample_completions
from ...text.scoring import Measure, Statistics, completion_statistics
from ..data import PromptRow
from ..distributed.processes import Processes
from ..prompts.room import check_room

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ...text.model import LanguageModel, LanguageWeights

STRETCHES = 8
"""The longest completion is divided into this many stretches of equal length. Metrics report the ratio of each."""


@dataclass(frozen=True)
class Completions:
    """B sampled completions of P prompts.

    Attributes:
        prompts: P lists of token ids.
        sampled: ids, log-probs under the sampler, and whether each completion ended.
        samples: B texts.
        prompt_of_sample: [B] index of the prompt of each completion, rising.
        updates: how many parts of whole prompts the rollout is cut into, one for each optimizer step.
        drop_truncated: whether completions that did not end are left out.
        parts: the parts of the completions; None if the recipe does not cut them.
        cuts: the first prompt of each part of the rollout after the first; nearly equal parts if left out.
        contexts: B lists of token ids that precede each completion; the ids of its prompt if left out.
        own: B lists that say which tokens the policy drew, and are trained; all tokens if left out.
        counted: whether each completion is compared and trained; all are if left out.
        told: what the index of samples says about each completion.
        teachers: for each completion, token ids that precede it when its teacher reads it, or None if it has no
            teacher; an extension gives them.
        taught_by: the name of each prompt's frozen teacher; empty if the recipe has none.
        drawn: whether the policy drew the completions. If not, the data have given some or all of them, and `sampled`
            has no log-probs for these.
        keys: the number of each prompt that addresses its randomness; empty if there is none.
    """

    prompts: list[list[int]]
    sampled: Sampled
    samples: list[str]
    prompt_of_sample: list[int]
    updates: int = 1
    drop_truncated: bool = False
    parts: Parts | None = None
    cuts: tuple[int, ...] | None = None
    contexts: list[list[int]] | None = None
    own: list[list[bool]] | None = None
    counted: list[bool] | None = None
    told: list[dict[str, Any]] | None = None
    teachers: list[list[int] | None] | None = None
    taught_by: tuple[str, ...] = ()
    drawn: bool = True
    keys: tuple[int, ...] = ()
    columns: int = field(default=STRETCHES, init=False)

    def given(self) -> dict[str, list[Any]]:
        """Name -> B values that rewards get beside the columns of the prompts."""
        own: dict[str, list[Any]] = {
            "completion_ids": self.sampled.ids,
            "truncated": [not ended for ended in self.sampled.ended],
        }
        if self.keys:
            own[NOISE_KEY] = [self.keys[prompt] for prompt in self.prompt_of_sample]
        if not self.drawn:
            own |= {name: [one[name] for one in self.origins()] for name in OF_GIVEN}
        return own if self.parts is None else {**own, "parts": self.parts.texts}

    def part(self, update: int) -> tuple[int, int]:
        """First prompt and end of part `update` of the rollout; the range may be empty."""
        bounds = part_bounds(len(self.prompts), self.updates, self.cuts)
        return bounds[update], bounds[update + 1]

    @cached_property
    def groups(self) -> Tensor:
        """[B] indices of prompts."""
        return torch.tensor(self.prompt_of_sample)

    @cached_property
    def lengths(self) -> Tensor:
        """[B] numbers of tokens, including the end token."""
        return torch.tensor([len(ids) for ids in self.sampled.ids])

    @cached_property
    def log_probs(self) -> Tensor:
        """[B] log-probs of whole completions under the sampler; tokens that it did not draw add 0."""
        return torch.tensor([sum(one) for one in self.sampled.log_probs], dtype=torch.float64)

    @property
    def scouted(self) -> tuple[()]:
        """Empty: completions have no scouts."""
        return ()

    @cached_property
    def outcomes(self) -> Tensor:
        """[B] bool: completions that count."""
        ended = torch.tensor(self.sampled.ended)
        found = ended if self.drop_truncated else torch.ones_like(ended)
        return found if self.counted is None else found & torch.tensor(self.counted)

    def context(self, row: int) -> list[int]:
        """The ids that precede a completion."""
        return self.prompts[self.prompt_of_sample[row]] if self.contexts is None else self.contexts[row]

    def context_numbers(self) -> list[int] | None:
        """[B] a number for each different context; None if every completion follows its prompt alone."""
        if self.contexts is None:
            return None
        seen: dict[tuple[Any, ...], int] = {}
        return [seen.setdefault(identity(ids), len(seen)) for ids in self.contexts]

    def trained(self, rows: Sequence[int]) -> Tensor:
        """[R, T] bool: the tokens of some completions that the policy drew; False after their ends."""
        width = int(self.lengths[list(rows)].max())
        if self.own is None:
            return torch.arange(width) < self.lengths[list(rows), None]
        return torch.tensor([self.own[row] + [False] * (width - len(self.own[row])) for row in rows])

    def described(self) -> list[str]:
        """[B] the length of each completion in words."""
        pairs = zip(self.sampled.ids, self.sampled.ended)
        return [f"{len(ids)} tokens{'' if ended else ', cut there'}" for ids, ended in pairs]

    def origins(self) -> list[dict[str, Any]]:
        """[B] what a form of the rollout tells; else the prompt and the number of a completion say everything."""
        return [{} for _ in self.samples] if self.told is None else self.told

    def node_advantages(self, leaf: Tensor) -> Tensor:
        """The advantages unchanged, because a completion is a node."""
        return leaf

    def siblings(self, among: str) -> Tensor:
        """The groups."""
        return self.groups

    def kept(self, chosen: Tensor) -> Tensor:
        """`chosen` unchanged, because a completion is a node."""
        return chosen

    def record(self) -> dict[str, float]:
        """Tokens sampled, mean length, share of completions cut at the longest length, and mean number of parts."""
        lengths, ended = self.lengths.float(), torch.tensor(self.sampled.ended)
        return {
            "tokens": float(lengths.sum()),
            "length": float(lengths.mean()),
            "truncated": float((~ended).float().mean()),
            **({} if self.parts is None else {"parts": sum(map(len, self.parts.texts)) / len(self.samples)}),
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
    sampler: Sampler = sample_completions,
    seen: Callable[[int], None] | None = None,
    made: Callable[[Completions], None] | None = None,
) -> Completions:
    """`complete_seeded` with seeds that come from the key of each prompt."""
    seeds = completion_keys(keys, group)
    return complete_seeded(
        language, rows, seeds, group, settings, temperature=temperature, batch=batch, sampler=sampler, seen=seen,
        made=made, keys=keys,
    )  # fmt: skip


def complete_seeded(
    language: LanguageModel,
    rows: Sequence[PromptRow],
    seeds: Sequence[int],
    group: int,
    settings: GenerationConfig,
    *,
    temperature: float,
    batch: int,
    sampler: Sampler = sample_completions,
    seen: Callable[[int], None] | None = None,
    made: Callable[[Completions], None] | None = None,
    keys: Sequence[int] = (),
) -> Completions:
    """`group` completions of each prompt. Whole groups are sampled together, as many as fit into `batch`.

    Args:
        language: the model.
        rows: P prompts.
        seeds: P times `group` seeds, prompt by prompt.
        group: completions of a prompt.
        settings: lengths and filters.
        temperature: 0 takes the likeliest token.
        batch: completions sampled at once.
        sampler: samples a batch.
        seen: called after each batch with the number of completions so far.
        made: called with the completions of each batch, if a batch holds whole groups.
        keys: the number of each prompt that addresses its randomness, for rewards with noise of their own.
    """
    prompts = [fitted(language, row, settings.max_tokens) for row in rows]
    owner = [p for p in range(len(rows)) for _ in range(group)]
    ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    ended: list[bool] = []
    texts: list[str] = []
    size = batch // group * group if batch >= group else batch
    for k in range(0, len(owner), size):
        mine = owner[k : k + size]
        part = sampler(
            language, prompts[mine[0] : mine[-1] + 1], [p - mine[0] for p in mine], seeds[k : k + size],
            max_tokens=settings.max_tokens, temperature=temperature, top_k=settings.top_k, top_p=settings.top_p,
            min_p=settings.min_p, stop=settings.stop,
        )  # fmt: skip
        ids, log_probs, ended = ids + part.ids, log_probs + part.log_probs, ended + part.ended
        own = [language.decode(one) for one in part.ids]
        texts += own
        if made is not None and batch >= group:
            made(Completions(prompts, part, own, mine, keys=tuple(keys)))
        if seen is not None:
            seen(len(ids))
    return Completions(prompts, Sampled(ids, log_probs, ended), texts, owner, keys=tuple(keys))


def fitted(language: LanguageModel, row: PromptRow, tokens: int) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ValueError: the model has no positions for the prompt and a completion of `tokens` tokens.
    """
    ids = language.encode(row.text, row.messages, row.pictures)
    check_positions(language, row.text, len(ids), tokens)
    return ids


def check_positions(language: LanguageModel, prompt: str, given: int, tokens: int) -> None:
    """Check that the model has positions for a prompt of `given` tokens and a completion of `tokens` tokens.

    Raises:
        ValueError: it has not.
    """
    if language.positions is not None:
        # Nothing follows the last token, so the model never sees it.
        check_room(language.positions + 1, prompt, given, tokens, "generation.max_tokens")


def sampler_of(language: LanguageModel, recipe: TextRecipe) -> Sampler:
    """The sampler of a run.

    Raises:
        ImportError: the engine is not installed.
        ValueError: a recipe must not set an option of the engine, or the engine does not run in several processes.
    """
    settings = recipe.generation
    if settings.engine == "transformers":
        return sample_completions
    ranks = Processes.of_this_run().count
    if ranks > 1:
        raise ValueError(
            f"generation.engine vllm runs in one process, and this run has {ranks}; use one, or engine transformers"
        )
    from ...text.vllm_engine import VllmEngine

    return VllmEngine(
        language, dtype=recipe.model.dtype, seed=recipe.run.seed,
        longest=settings.max_prompt_tokens + settings.max_tokens, options=settings.engine_options,
    )  # fmt: skip


class TextPolicy:
    """A language model that samples and scores.

    Args:
        language: the model.
        weights: its trained weights.
        recipe: lengths, temperature, batches.

    Attributes:
        reference: a context with the base model.
        average: a context with the average of the weights that the objective asks for; None if it asks for none.
        frozen: the other models that teach and are loaded, by path.
    """

    def __init__(self, language: LanguageModel, weights: LanguageWeights, recipe: TextRecipe) -> None:
        self.language, self.weights, self.recipe = language, weights, recipe
        self.device = next(language.model.parameters()).device
        self.reference: Callable[[], AbstractContextManager[None]] = weights.reference
        self.average: Callable[[], AbstractContextManager[None]] | None = None
        self.frozen: dict[str, TextPolicy] = {}
        self.sampler = sampler_of(language, recipe)

    def sample(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        group: int,
        *,
        temperature: float,
        batch: int,
        seen: Callable[[int], None] | None = None,
        made: Callable[[Completions], None] | None = None,
    ) -> Completions:
        """`group` completions of each prompt, addressed by the key of the prompt, see `complete`."""
        # Other engines make batches by themselves.
        size = batch if self.sampler is sample_completions else max(len(rows) * group, 1)
        found = complete(
            self.language, rows, keys, group, self.recipe.generation, temperature=temperature, batch=size,
            sampler=self.sampler, seen=seen, made=made,
        )  # fmt: skip
        return self.cut(found)

    def cut(self, found: Completions) -> Completions:
        """Completions with their parts, if the recipe cuts them."""
        cut = self.recipe.parts
        if cut is None:
            return found
        pattern = cut.pattern or CUTS[cut.cut]
        return replace(found, parts=cut_completions(found.samples, found.sampled.ids, self.language.decode, pattern))

    def log_probs(self, completions: Completions, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Log-probs [R, T] and mask [R, T] of some completions, at the temperature of sampling."""
        found = self.statistics(completions, rows)
        return found.log_probs, found.mask

    def statistics(
        self, completions: Completions, rows: Sequence[int], *, entropy: bool = False, measure: Measure | None = None
    ) -> Statistics:
        """Log-probs of some completions, and with `entropy` also entropies, at the temperature of sampling.

        For a `measure`, the places of completions are places in `rows`.
        """
        whole = completions.contexts is None
        # Two prompts with the same words may have different teachers, so their completions are never scored once.
        owners = [
            (completions.prompt_of_sample[row], () if whole else identity(completions.context(row))) for row in rows
        ]
        known = {owner: completions.context(row) for owner, row in zip(owners, rows)}
        places = {owner: k for k, owner in enumerate(known)}
        model = self.recipe.model
        return completion_statistics(
            self.language,
            list(known.values()),
            [completions.sampled.ids[row] for row in rows],
            [places[owner] for owner in owners],
            temperature=self.recipe.generation.temperature,
            # A backward pass that recomputes activations cannot use the cache of a shared prefix.
            shared_prefix=model.shared_prefix and not model.gradient_checkpointing,
            entropy=entropy,
            measure=measure,
        )
