"""Sampling of completions with addressed randomness: what a sample becomes depends on its key, not on its neighbours.

transformers' `generate` draws from the global generator, so that a completion would change with the batch it is in.
Here every completion has its own stream of uniform numbers, one a token, which pick from the distribution by its
cumulative sum. A group's prompt is encoded once, and a completion that has ended leaves the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.addressing import address
from ..core.advantages import as_precise
from .model import LanguageModel


@dataclass(frozen=True)
class Sampled:
    """B completions.

    Attributes:
        ids: B lists of token ids, the ending token included where there is one.
        log_probs: B lists, each token's under the distribution it was drawn from.
        ended: whether each ended by itself, or was cut at the longest length.
    """

    ids: list[list[int]]
    log_probs: list[list[float]]
    ended: list[bool]


class Sampler(Protocol):
    """Whatever completes prompts as `sample_completions` does."""

    def __call__(
        self,
        language: LanguageModel,
        prompts: Sequence[Sequence[int]],
        owner: Sequence[int],
        keys: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Sampled:
        """B completions of P prompts."""


def left_padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, L] with padding before each row, and the mask of what is not padding."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def positions_of(mask: Tensor) -> Tensor:
    """Position ids [B, L] that count only what the mask [B, L] lets through."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def filtered(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Logits [B, V] with everything outside of the likeliest `top_k` tokens, or `top_p` of the mass, at -inf.

    A token is kept by `top_p` if those likelier than it have less than that mass, so one always is.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(descending=True)
        mass = as_precise(ordered).softmax(-1)
        drop = (mass.cumsum(-1) - mass) >= top_p
        logits = logits.masked_fill(drop.gather(-1, order.argsort(-1)), -torch.inf)
    return logits


def pick(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Token [B] of each row of logits [B, V] at its uniform number [B] in [0, 1), and its log-prob."""
    log_probs = as_precise(logits).log_softmax(-1)
    mass = log_probs.exp().cumsum(-1)
    threshold = (uniform.to(mass) * mass[:, -1])[:, None]
    # `right` takes the first token whose cumulated mass exceeds the number: never one without any mass.
    token = torch.searchsorted(mass, threshold, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
    return token, log_probs.gather(1, token[:, None]).squeeze(1)


@torch.no_grad()
def sample_completions(
    language: LanguageModel,
    prompts: Sequence[Sequence[int]],
    owner: Sequence[int],
    keys: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Sampled:
    """Complete prompts.

    Args:
        language: the model.
        prompts: P lists of token ids.
        owner: [B] the prompt of each completion, rising.
        keys: B numbers, each the seed of a completion's uniform numbers.
        max_tokens: longest completion, the ending token included.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only the likeliest so many tokens.
        top_p: only the likeliest tokens of this mass.

    Returns:
        B completions.
    """
    model, device = language.model, next(language.model.parameters()).device
    ends = torch.tensor(language.ends, device=device)
    count = len(owner)
    uniform = torch.stack(
        [torch.rand(max_tokens, generator=torch.Generator().manual_seed(key), dtype=torch.float64) for key in keys]
    )
    ids, mask = left_padded(prompts, language.pad, device)
    last = logits_kept(model, 1)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=True, **last)
    cache, chosen = out.past_key_values, torch.tensor(list(owner), device=device)
    select_rows(cache, chosen)
    logits, mask = out.logits[chosen, -1], mask[chosen]
    alive = torch.arange(count, device=device)
    found: list[list[int]] = [[] for _ in range(count)]
    chances: list[list[float]] = [[] for _ in range(count)]
    ended = [False] * count
    for t in range(max_tokens):
        if temperature == 0:
            token = logits.argmax(-1)
            chance = torch.zeros(len(token))
        else:
            token, chance = pick(filtered(logits / temperature, top_k, top_p), uniform[alive.cpu(), t])
        stops = torch.isin(token, ends)
        for row, one, p, stop in zip(alive.tolist(), token.tolist(), chance.tolist(), stops.tolist()):
            found[row].append(one)
            chances[row].append(p)
            ended[row] = stop
        going = (~stops).nonzero().flatten()
        if len(going) == 0 or t + 1 == max_tokens:
            break
        if len(going) < len(alive):
            select_rows(cache, going)
            alive, mask, token = alive[going], mask[going], token[going]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        out = model(
            input_ids=token[:, None], attention_mask=mask, position_ids=positions_of(mask)[:, -1:],
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        cache, logits = out.past_key_values, out.logits[:, -1]
    return Sampled(found, chances, ended)


def completion_keys(keys: Sequence[int], group: int) -> list[int]:
    """Seeds of `group` completions of each prompt, from the key of each prompt."""
    return [address(key, 0, k) for key in keys for k in range(group)]


def select_rows(cache: Any, rows: Tensor) -> None:
    """Keep some rows of a cache of keys and values, each as often as it is named.

    Raises:
        ValueError: the model keeps a state that is no such cache.
    """
    if not hasattr(cache, "batch_select_indices"):
        raise ValueError(
            f"the model keeps its past in a {type(cache).__name__}, whose rows cannot be chosen; use a model with a "
            "cache of keys and values"
        )
    cache.batch_select_indices(rows)


def logits_kept(model: Any, count: int) -> dict[str, int]:
    """The argument that has a model compute only its last `count` logits, where it knows one."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
