"""Sampling of completions with addressed randomness: a sample depends on its key, not on the rest of its batch.

transformers' `generate` draws from the global generator, so a completion would depend on its batch. Here every
completion has its own stream of uniform numbers, one for each token. Each number picks a token by the cumulative sum of
the distribution. A group's prompt is encoded once, completions with the same beginning share their pass over it, and a
completion that has ended leaves the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..core.addressing import address
from ..core.advantages import as_precise
from ..core.categorical import pick, tempered
from .broken import refuse_nan
from .key_value_cache import cache_argument, cache_of, has_keys, select_rows
from .prompt_batch import positions_after

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from .model import LanguageModel

Temperature = float | Callable[[Tensor], Tensor]
"""A number, or a function from the logits [B, V] of the next tokens to temperatures [B] above 0."""


@dataclass(frozen=True)
class Sampled:
    """B completions.

    Attributes:
        ids: B lists of token ids, including the end token if there is one.
        log_probs: B lists of the log-prob of each token, under the distribution from which it was drawn.
        ended: whether each completion ended with an end token or a text of `stop`; false if it was cut at the longest
            length.
    """

    ids: list[list[int]]
    log_probs: list[list[float]]
    ended: list[bool]


class Sampler(Protocol):
    """Anything that completes prompts in the way of `sample_completions`."""

    def __call__(
        self,
        language: LanguageModel,
        prompts: Sequence[Sequence[int]],
        owner: Sequence[int],
        keys: Sequence[int],
        *,
        max_tokens: int,
        temperature: Temperature = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        stop: Sequence[str] = (),
    ) -> Sampled:
        """B completions of P prompts."""


def filtered(logits: Tensor, top_k: int | None, top_p: float | None, min_p: float | None = None) -> Tensor:
    """Logits [B, V], set to -inf outside the likeliest `top_k` tokens or the likeliest tokens with mass `top_p`.

    `top_p` keeps a token if all likelier tokens together have less mass than `top_p`. So at least one token is always
    kept. `min_p` keeps the tokens with at least `min_p` times the probability of the likeliest token (Nguyen et al.
    2024, arXiv 2407.01082). Each filter sees what the filters before it have left.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(descending=True)
        mass = as_precise(ordered).softmax(-1)
        drop = (mass.cumsum(-1) - mass) >= top_p
        logits = logits.masked_fill(drop.gather(-1, order.argsort(-1)), -torch.inf)
    if min_p:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    return logits


@torch.no_grad()
def sample_completions(
    language: LanguageModel,
    prompts: Sequence[Sequence[int]],
    owner: Sequence[int],
    keys: Sequence[int],
    *,
    max_tokens: int,
    temperature: Temperature = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop: Sequence[str] = (),
) -> Sampled:
    """Complete prompts.

    Args:
        language: the model.
        prompts: P lists of token ids.
        owner: [B] the index of each completion's prompt, in rising order.
        keys: B seeds, one for the uniform numbers of each completion.
        max_tokens: length of the longest completion, end token included.
        temperature: logits are divided by it, or by what it makes of them; 0 takes the likeliest token.
        top_k: sample only from this many likeliest tokens.
        top_p: sample only from the likeliest tokens that together have this mass.
        min_p: sample only from tokens that have this share of the likeliest token's probability.
        stop: texts that end a completion. The completion keeps the text, and its last token whole.

    Returns:
        B completions.

    Raises:
        FloatingPointError: a logit is NaN.
    """
    model, device = language.model, next(language.model.parameters()).device
    ends = torch.tensor(language.ends, device=device)
    count = len(owner)
    uniform = torch.stack(
        [torch.rand(max_tokens, generator=torch.Generator().manual_seed(key), dtype=torch.float64) for key in keys]
    )
    batch = language.batch(prompts)
    mask, shift = batch.mask, batch.shift
    last, into = logits_kept(model, 1), cache_argument(model)
    out = model(
        input_ids=batch.ids, attention_mask=mask, position_ids=batch.positions(), use_cache=True, **last,
        **batch.inputs(),
    )  # fmt: skip
    cache, logits = cache_of(out), language.said(out.logits[:, -1])
    masks = has_keys(cache)
    state = torch.tensor(list(owner), device=device)  # which row of the cache each completion that goes on continues
    alive = torch.arange(count, device=device)
    found: list[list[int]] = [[] for _ in range(count)]
    chances: list[list[float]] = [[] for _ in range(count)]
    ended = [False] * count
    said = stopping(language.tokenizer, stop) if stop else None
    drawn = torch.zeros(count, max_tokens if stop else 0, dtype=torch.long, device=device)
    for t in range(max_tokens):
        refuse_nan(logits)
        if temperature == 0:
            token = logits.argmax(-1)[state]
            chance = torch.zeros(len(token))
        else:
            if callable(temperature):
                scaled = logits / temperature(logits)[:, None].to(logits)
            else:
                scaled = tempered(logits, temperature)
            likely = filtered(scaled, top_k, top_p, min_p)
            token, chance = pick(likely[state], uniform[alive.cpu(), t])
        stops = torch.isin(token, ends)
        if said is not None:
            drawn[alive, t] = token
            stops |= said(drawn[alive, : t + 1], None).to(device)
        for row, one, p, over in zip(alive.tolist(), token.tolist(), chance.tolist(), stops.tolist()):
            found[row].append(one)
            chances[row].append(p)
            ended[row] = over
        going = (~stops).nonzero().flatten()
        if len(going) == 0 or t + 1 == max_tokens:
            break
        size = logits.shape[-1]
        different, state = (state[going] * size + token[going]).unique(return_inverse=True)
        alive, before = alive[going], different // size
        if not torch.equal(before, torch.arange(len(mask), device=device)):
            select_rows(cache, before)
            shift = None if shift is None else shift[:, before]
        mask = torch.cat([mask[before], mask.new_ones(len(before), 1)], dim=1)
        # Without keys there is nothing to leave out, and Mamba would apply the whole mask to a single token.
        left_out = {"attention_mask": mask} if masks else {}
        out = model(
            input_ids=(different % size)[:, None], position_ids=positions_after(mask, shift, 1),
            use_cache=True, **{into: cache}, **left_out,
        )  # fmt: skip
        cache, logits = cache_of(out), language.said(out.logits[:, -1])
    return Sampled(found, chances, ended)


def stopping(tokenizer: Any, stop: Sequence[str]) -> Any:
    """A function from ids [B, T] and None to [B] bool: the last token of a row completes one of the texts.

    Raises:
        ValueError: the tokenizer does not say which text each token stands for.
    """
    from transformers.generation.stopping_criteria import StopStringCriteria

    try:
        return StopStringCriteria(tokenizer, list(stop))
    except ValueError as error:
        if "matching one or more" in str(error):
            texts = ", ".join(map(repr, stop))
            raise ValueError(
                f"generation.stop is {texts}, and the model has no tokens that write it; name texts that it can write, "
                "or leave generation.stop out"
            ) from error
        # It looks for the letters `abcdef` among the tokens, and some tokenizers have no letters.
        raise ValueError(
            f"generation.stop: {type(tokenizer).__name__} does not tell the texts of its tokens ({error}); leave "
            "generation.stop out"
        ) from error


def completion_keys(keys: Sequence[int], group: int) -> list[int]:
    """Seeds of `group` completions of each prompt, from the key of each prompt."""
    return [address(key, 0, k) for key in keys for k in range(group)]


def logits_kept(model: Any, count: int) -> dict[str, int]:
    """The argument that makes a model compute only its last `count` logits; empty if it has no such argument."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
