"""Log-probs of completions under a model, with gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.categorical import tempered, token_log_probs
from .key_value_cache import cache_argument, cache_of, select_rows
from .prompt_batch import PromptBatch, positions_after
from .sampling import logits_kept

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from .model import LanguageModel


def right_padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, T] with padding after each row, and the mask [B, T] of the tokens that are not padding."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([list(row) + [pad] * (width - len(row)) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(width, device=device)[None, :] < lengths[:, None]


def right_padded_values(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """[B, T] from ragged rows, with 0 after the end of each row."""
    width = max(len(row) for row in rows)
    return torch.tensor([list(row) + [0.0] * (width - len(row)) for row in rows], device=device)


Measure = Callable[[Tensor, Tensor, Sequence[int], int], Tensor]
"""`measure(logits [R, N, V], ids [R, T], rows, first) -> [R, T, ...]`: something of each token, from its logits.

N is T or more, and the logits of token t are at t. `rows` are R places among the completions that are scored. The
tokens are those from the number `first` of their completions on. Completions that are scored once have one place."""

CHUNK = 4096
LEAST = -1e4  # its exp is 0


@dataclass(frozen=True)
class Statistics:
    """Statistics of B completions of up to T tokens.

    Attributes:
        log_probs: [B, T] float32, 0 in the padding.
        mask: [B, T] bool, the tokens that are not padding.
        entropy: [B, T] entropy of the distribution of each token, in nats, 0 in the padding; None if it was not asked
            for.
        measured: [B, T, ...] what a `Measure` found, any value in the padding; None if nothing was measured.
    """

    log_probs: Tensor
    mask: Tensor
    entropy: Tensor | None
    measured: Tensor | None = None

    def repeated(self, rows: Sequence[int]) -> Statistics:
        """The statistics of [C] completions from the B different ones; `rows` [C] says which one each of them is."""
        # The gradient of an index is summed in a fixed order on every device; the gradient of index_select is not.
        index = torch.tensor(list(rows), device=self.mask.device)
        spread = None if self.entropy is None else self.entropy[index]
        measured = None if self.measured is None else self.measured[index]
        return Statistics(self.log_probs[index], self.mask[index], spread, measured)


def completion_log_probs(
    language: LanguageModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    owner: Sequence[int],
    *,
    temperature: float = 1.0,
    shared_prefix: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs of completions [B, T], and their mask; see `completion_statistics`."""
    found = completion_statistics(
        language, prompts, completions, owner, temperature=temperature, shared_prefix=shared_prefix
    )
    return found.log_probs, found.mask


def completion_statistics(
    language: LanguageModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    owner: Sequence[int],
    *,
    temperature: float = 1.0,
    shared_prefix: bool = True,
    entropy: bool = False,
    measure: Measure | None = None,
) -> Statistics:
    """Log-probs of completions, and the entropies of the distributions of their tokens.

    With `shared_prefix` each prompt is encoded once, and all of its completions use its keys and values (Prefix
    Grouper, arXiv 2506.05433). Equal completions of a prompt are scored once. Value and gradient equal the value and
    gradient of the plain path, up to rounding. P prompts are encoded instead of B. A model that keeps states of the
    past, such as Qwen3.5, encodes the prompt for each completion in any case.

    Args:
        language: the model.
        prompts: P lists of token ids.
        completions: B lists of token ids, none empty.
        owner: [B] the index of each completion's prompt.
        temperature: logits are divided by it.
        shared_prefix: whether to encode each prompt, and each of its different completions, only once.
        entropy: whether to compute entropies. They are over all tokens at the temperature, without the filters of the
            sampler.
        measure: what else to find out about each token from its logits.
    """
    places: Sequence[int] = range(len(completions))
    # Layers write their states over, and no gradient passes through a state that was written over.
    through = _shared if shared_prefix and not language.keeps_states else _plain
    if shared_prefix:
        places, inverse = _different(completions, owner)
        if len(places) < len(completions):
            completions, owner = [completions[k] for k in places], [owner[k] for k in places]
            once = _statistics(language, prompts, completions, owner, temperature, through, entropy, measure, places)
            return once.repeated(inverse)
    return _statistics(language, prompts, completions, owner, temperature, through, entropy, measure, places)


def _different(completions: Sequence[Sequence[int]], owner: Sequence[int]) -> tuple[list[int], list[int]]:
    """The first place of each different completion of a prompt, and for each completion its number among them."""
    found: dict[tuple[int, ...], int] = {}
    places, inverse = list[int](), list[int]()
    for place, (ids, prompt) in enumerate(zip(completions, owner)):
        number = found.setdefault((prompt, *ids), len(places))
        if number == len(places):
            places.append(place)
        inverse.append(number)
    return places, inverse


def _statistics(
    language: LanguageModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    owner: Sequence[int],
    temperature: float,
    through: Callable[..., list[Tensor]],
    entropy: bool,
    measure: Measure | None,
    places: Sequence[int],
) -> Statistics:
    device = next(language.model.parameters()).device
    ids, mask = right_padded(completions, language.pad, device)
    given = through(language.model, language.batch(prompts), owner, ids, mask)
    parts = [language.said(logits) for logits in given]
    # One number a token is joined, and not its logits, which would be in memory twice.
    starts = list(itertools.accumulate((logits.shape[1] for logits in parts), initial=0))
    # The last logits of a whole sequence belong to no token. A cut would copy all the others.
    wanted = [ids[:, first : first + part.shape[1]] for first, part in zip(starts, parts)]
    log_probs = torch.cat([token_log_probs(part, of, temperature) for part, of in zip(parts, wanted)], dim=1)
    found, spread = torch.where(mask, log_probs, 0.0), None
    if entropy:
        entropies = torch.cat(
            [token_entropies(part, temperature)[:, : of.shape[1]] for part, of in zip(parts, wanted)], dim=1
        )
        spread = torch.where(mask, entropies, 0.0)
    if measure is None:
        return Statistics(found, mask, spread)
    values = [measure(part, of, places, first) for part, of, first in zip(parts, wanted, starts)]
    return Statistics(found, mask, spread, torch.cat(values, dim=1))


def _plain(model: Any, batch: PromptBatch, owner: Sequence[int], ids: Tensor, mask: Tensor) -> list[Tensor]:
    """One tensor of logits [B, T + 1, V], prompt and completion in one sequence; the last ones follow the end."""
    rows = torch.tensor(list(owner), device=ids.device)
    whole = torch.cat([batch.mask[rows], mask.long()], dim=1)
    keep, shift = ids.shape[1] + 1, None if batch.shift is None else batch.shift[:, rows]
    after = positions_after(whole, shift, ids.shape[1])
    out = model(
        input_ids=torch.cat([batch.ids[rows], ids], dim=1), attention_mask=whole,
        position_ids=torch.cat([batch.positions()[..., rows, :], after], dim=-1),
        use_cache=False, **logits_kept(model, keep), **batch.inputs(owner, ids.shape[1]),
    )  # fmt: skip
    return [out.logits if out.logits.shape[1] == keep else out.logits[:, -keep:]]


def _shared(model: Any, batch: PromptBatch, owner: Sequence[int], ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Logits [B, 1, V] of the first token, from the pass over each prompt, and [B, T-1, V] of the other tokens."""
    rows = torch.tensor(list(owner), device=ids.device)
    out = model(
        input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions(), use_cache=True,
        **logits_kept(model, 1), **batch.inputs(),
    )  # fmt: skip
    first = out.logits[rows, -1:]
    if ids.shape[1] == 1:
        return [first]
    cache, shift = cache_of(out), None if batch.shift is None else batch.shift[:, rows]
    select_rows(cache, rows)
    whole = torch.cat([batch.mask[rows], mask[:, :-1].long()], dim=1)
    rest = model(
        input_ids=ids[:, :-1], attention_mask=whole, position_ids=positions_after(whole, shift, ids.shape[1] - 1),
        use_cache=True, **{cache_argument(model): cache},
    )  # fmt: skip
    return [first, rest.logits]


def token_entropies(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropies [B, T] in nats of the distributions of logits [B, T, V], in float32 whatever the logits are.

    The distributions are computed for `CHUNK` positions at a time, and again in the backward pass. So no distribution
    is kept.
    """
    flat = logits.flatten(0, 1)
    parts = []
    for k in range(0, len(flat), CHUNK):
        arguments = (flat[k : k + CHUNK], temperature)
        parts.append(
            checkpoint(_entropy, *arguments, use_reentrant=False) if logits.requires_grad else _entropy(*arguments)
        )
    return torch.cat(parts).view(logits.shape[:-1])


def _entropy(logits: Tensor, temperature: float) -> Tensor:
    log_p = tempered(logits.float(), temperature).log_softmax(1)
    # A token with a logit of -inf adds 0; without the clamp, 0 * -inf would be NaN.
    return -(log_p.exp() * log_p.clamp(min=LEAST)).sum(1)
