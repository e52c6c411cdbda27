"""Sampling of models that write block after block, with the keys and values of what is finished kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.completion_blocks import open_block, seen_in_blocks
from .key_value_cache import copied, select_rows, select_tokens
from .masked_model import Frame, MaskedLanguageModel

UNSEEN = 2**30
"""The number of a block that no token sees: padding, and places of the cache that hold nothing."""


@dataclass
class _Kept:
    """What is kept of N rows.

    Attributes:
        frames: the N prompts.
        x: [N, L] the completions at the last call.
        held: [N] how many tokens of each completion are in the cache: its finished blocks.
        numbers: [N, W] number of the block of each token in the cache.
        cache: keys and values of the prompts and the finished blocks, as transformers has it.
        used: number of the last call.
    """

    frames: tuple[Frame, ...]
    x: Tensor
    held: Tensor
    numbers: Tensor
    cache: Any = None
    used: int = 0

    def goes_on(self, frames: Sequence[Frame], x: Tensor, starts: Tensor) -> bool:
        """Whether these rows, one by one, are earlier states of M wanted ones."""
        if len(frames) != len(self.frames) or any(one is not other for one, other in zip(frames, self.frames)):
            return False
        return bool((self._agree(x, self.x, self.held) & (self.held <= starts)).all())

    def rows_for(self, frames: Sequence[Frame], x: Tensor, starts: Tensor) -> Tensor | None:
        """[M] a row that is an earlier state of each of M wanted ones, or None if one of them has none."""
        ids = [torch.tensor([id(frame) for frame in some], device=x.device) for some in (frames, self.frames)]
        fits = (ids[0][:, None] == ids[1]) & (self.held <= starts[:, None])
        fits &= self._agree(x[:, None], self.x, self.held)
        return (fits * (self.held + 1)).argmax(1) if bool(fits.any(1).all()) else None

    @staticmethod
    def _agree(x: Tensor, before: Tensor, held: Tensor) -> Tensor:
        place = torch.arange(x.shape[-1], device=x.device)
        return ((x == before) | (place >= held[:, None])).all(-1)

    def chosen(self, rows: Tensor) -> _Kept:
        """Some of the rows. Where a row is named twice, these rows stay as they are too."""
        kept = self if len(rows.unique()) == len(rows) else replace(self, cache=copied(self.cache))
        kept.frames = tuple(self.frames[row] for row in rows.tolist())
        kept.x, kept.held, kept.numbers = self.x[rows], self.held[rows], self.numbers[rows]
        select_rows(kept.cache, rows)
        return kept


class FinishedBlocks:
    """Logits of the open blocks of completions, as `MaskedLanguageModel.logits` gives them up to rounding.

    A finished block does not depend on what follows it, so its keys and values are computed once. A step evaluates the
    tokens of the open block alone, and with the first step of a block the block before it. The rows of a batch may be
    at different blocks.

    Args:
        language: a model of blocks.
    """

    def __init__(self, language: MaskedLanguageModel) -> None:
        self.language = language
        self._kept: list[_Kept] = []
        self._calls = 0

    def logits(self, frames: Sequence[Frame], x: Tensor) -> Tensor:
        """Logits [N, block, V] at the places of the first block that has a mask.

        Args:
            frames: N prompts, the same objects at each call.
            x: [N, L] token ids of the completions, masks among them.
        """
        block, device = self.language.block, x.device
        assert block is not None
        starts = open_block(x == self.language.mask, block)[:, 0]
        kept = self._found(tuple(frames), x, starts)
        fresh = int((starts - kept.held).max())
        # All rows end with their open block. A row that needs fewer tokens before it has places there that no one sees.
        at = starts[:, None] - fresh + torch.arange(fresh + block, device=device)
        ids, numbers = x.gather(1, at.clamp(min=0)), torch.div(at, block, rounding_mode="floor")
        numbers = torch.cat([kept.numbers, numbers.masked_fill(at < kept.held[:, None], UNSEEN)], dim=1)
        positions = (_lengths(frames, device) + at).clamp(min=0)
        if kept.cache is None:
            heads = self._heads(frames, device)
            ids = torch.cat([heads, ids], dim=1)
            positions = torch.cat([torch.arange(heads.shape[1], device=device).expand_as(heads), positions], dim=1)
        count = ids.shape[1]
        wanted = torch.arange(count - block, count, device=device).expand(len(x), -1)
        found, cache = self.language.model.with_past(
            ids, seen_in_blocks(numbers, last=count), positions, wanted, kept.cache
        )
        # The open block changes at the next step.
        cache.crop(-block)
        kept.x, kept.held, kept.numbers, kept.cache = x, starts, numbers[:, :-block], cache
        if fresh:
            _closed_up(kept)
        return found

    def _found(self, frames: tuple[Frame, ...], x: Tensor, starts: Tensor) -> _Kept:
        """Earlier states of rows, with what is kept of them; states without anything if there are none."""
        self._calls += 1
        # Each batch of states calls once in a step, so an entry is given up if its states have not moved in two steps.
        self._kept = [entry for entry in self._kept if self._calls - entry.used <= 2 * len(self._kept)]
        going = [entry for entry in self._kept if entry.goes_on(frames, x, starts)]
        if going:
            kept = max(going, key=lambda entry: (int(entry.held.sum()), -entry.used))
        else:
            kept = self._chosen(frames, x, starts) or self._begun(frames, x)
        kept.used = self._calls
        return kept

    def _chosen(self, frames: tuple[Frame, ...], x: Tensor, starts: Tensor) -> _Kept | None:
        """Earlier states out of another batch, whose states have ended in part, or have children."""
        for entry in reversed(self._kept):
            rows = entry.rows_for(frames, x, starts)
            if rows is not None:
                entry.used = self._calls
                kept = entry.chosen(rows)
                if kept is not entry:
                    self._kept.append(kept)
                return kept
        return None

    def _begun(self, frames: tuple[Frame, ...], x: Tensor) -> _Kept:
        block, lengths = self.language.block or 1, _lengths(frames, x.device)
        number = torch.div(torch.arange(int(lengths.max()), device=x.device) - lengths, block, rounding_mode="floor")
        # The padding stands between a prompt and its completion.
        held = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self._kept.append(_Kept(frames, x, held, number.masked_fill(number >= 0, UNSEEN)))
        return self._kept[-1]

    def _heads(self, frames: Sequence[Frame], device: torch.device) -> Tensor:
        width = max(len(head) for head, _ in frames)
        rows = [[*head, *[self.language.pad] * (width - len(head))] for head, _ in frames]
        return torch.tensor(rows, device=device)


def _lengths(frames: Sequence[Frame], device: torch.device) -> Tensor:
    """[N, 1] tokens of the prompts."""
    return torch.tensor([len(head) for head, _ in frames], device=device)[:, None]


def _closed_up(kept: _Kept) -> None:
    """Take out places that hold nothing, once they are a third of the cache."""
    empty = kept.numbers == UNSEEN
    width = int((~empty).sum(1).max())
    if 2 * empty.shape[1] > 3 * width:
        places = empty.to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        kept.numbers = kept.numbers.gather(1, places)
        select_tokens(kept.cache, places)
