"""Log-probs of completions under a model, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .model import LanguageModel
from .sampling import left_padded, logits_kept, positions_of, select_rows

CHUNK = 4096


def right_padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, T] with padding after each row, and the mask [B, T] of what is not padding."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([list(row) + [pad] * (width - len(row)) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(width, device=device)[None, :] < lengths[:, None]


def completion_log_probs(
    language: LanguageModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    owner: Sequence[int],
    *,
    temperature: float = 1.0,
    shared_prefix: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probs of completions [B, T], and their mask.

    With `shared_prefix` each prompt is encoded once, and its keys and values serve all of its completions (Prefix
    Grouper, arXiv 2506.05433): value and gradient of the plain path to rounding, at the cost of P prompts in place of
    B.

    Args:
        language: the model.
        prompts: P lists of token ids.
        completions: B lists of token ids, none empty.
        owner: [B] the prompt of each completion.
        temperature: logits are divided by it.
        shared_prefix: encode each prompt once.

    Returns:
        (log-probs [B, T] float32, 0 in the padding; mask [B, T] bool).
    """
    device = next(language.model.parameters()).device
    ids, mask = right_padded(completions, language.pad, device)
    heads, head_mask = left_padded(prompts, language.pad, device)
    rows = torch.tensor(list(owner), device=device)
    through = _shared if shared_prefix else _plain
    logits = through(language.model, heads, head_mask, rows, ids, mask)
    found = token_log_probs(logits, ids, temperature)
    return torch.where(mask, found, 0.0), mask


def _plain(model: Any, heads: Tensor, head_mask: Tensor, rows: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """[B, T, V] logits, prompt and completion in one sequence."""
    whole = torch.cat([head_mask[rows], mask.long()], dim=1)
    keep = ids.shape[1] + 1
    out = model(
        input_ids=torch.cat([heads[rows], ids], dim=1), attention_mask=whole, position_ids=positions_of(whole),
        use_cache=False, **logits_kept(model, keep),
    )  # fmt: skip
    logits: Tensor = out.logits[:, -keep:-1]
    return logits


def _shared(model: Any, heads: Tensor, head_mask: Tensor, rows: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """[B, T, V] logits, each prompt encoded once; the first token is predicted by the prompt's own pass."""
    out = model(
        input_ids=heads,
        attention_mask=head_mask,
        position_ids=positions_of(head_mask),
        use_cache=True,
        **logits_kept(model, 1),
    )
    first = out.logits[rows, -1:]
    if ids.shape[1] == 1:
        return first
    cache = out.past_key_values
    select_rows(cache, rows)
    whole = torch.cat([head_mask[rows], mask[:, :-1].long()], dim=1)
    rest = model(
        input_ids=ids[:, :-1], attention_mask=whole, position_ids=positions_of(whole)[:, heads.shape[1] :],
        past_key_values=cache, use_cache=True,
    )  # fmt: skip
    return torch.cat([first, rest.logits], dim=1)


def token_log_probs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs [B, T] of tokens `ids` [B, T], in float32 whatever the logits [B, T, V] are.

    `CHUNK` positions are widened at a time and widened again in the backward pass, so that no float32 copy of all
    logits is kept.
    """
    flat, wanted = logits.flatten(0, 1), ids.flatten()
    parts = []
    for k in range(0, len(flat), CHUNK):
        arguments = (flat[k : k + CHUNK], wanted[k : k + CHUNK], temperature)
        if logits.requires_grad and logits.dtype != torch.float32:
            parts.append(checkpoint(_gather, *arguments, use_reentrant=False))
        else:
            parts.append(_gather(*arguments))
    return torch.cat(parts).view(ids.shape)


def _gather(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    scaled = logits.float() / temperature
    return scaled.gather(1, ids[:, None]).squeeze(1) - scaled.logsumexp(1)
