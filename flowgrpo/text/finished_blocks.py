"""Sampling of models that write block after block, with the keys and values of what is finished kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.completion_blocks import open_block, seen_in_blocks
from .masked_model import Frame, MaskedLanguageModel


@dataclass
class _Kept:
    """What is kept of N rows.

    Attributes:
        frames: the N prompts.
        finished: [N, F] tokens of the finished blocks.
        numbers: [N, W] number of the block of each token of the prompts, padding included.
        cache: keys and values of the prompts and the finished blocks, as transformers has it.
    """

    frames: tuple[Frame, ...]
    finished: Tensor
    numbers: Tensor
    cache: Any


class FinishedBlocks:
    """Logits of the open blocks of completions, as `MaskedLanguageModel.logits` gives them up to rounding.

    A finished block does not depend on what follows it, so its keys and values are computed once. A step evaluates the
    tokens of the open block alone, and with the first step of a block the block before it.

    Args:
        language: a model of blocks.
    """

    def __init__(self, language: MaskedLanguageModel) -> None:
        self.language = language
        self._kept: dict[tuple[int, ...], list[_Kept]] = {}

    def logits(self, frames: Sequence[Frame], x: Tensor) -> Tensor:
        """Logits [N, block, V] at the places of the first block that has a mask.

        Args:
            frames: N prompts, the same objects at each call.
            x: [N, L] token ids of the completions, masks among them.
        """
        block = self.language.block
        assert block is not None
        places = open_block(x == self.language.mask, block)
        start = int(places[0, 0])
        if bool((places[:, 0] != start).any()):
            return self.language.logits(frames, x)
        kept = self._found(tuple(frames), x[:, :start])
        new = x[:, kept.finished.shape[1] : start + block]
        first = [] if kept.cache is not None else [self._heads(frames)]
        ids = torch.cat([*first, new], dim=1)
        after = torch.arange(start + block, device=x.device).expand(len(x), -1)
        numbers = torch.cat([kept.numbers, torch.div(after, block, rounding_mode="floor")], dim=1)
        starts = torch.tensor([len(head) for head, _ in frames], device=x.device)[:, None]
        width = kept.numbers.shape[1]
        positions = torch.cat([torch.arange(width, device=x.device).expand(len(x), -1), starts + after], dim=1)
        count = ids.shape[1]
        wanted = torch.arange(count - block, count, device=x.device).expand(len(x), -1)
        found, cache = self.language.model.with_past(
            ids, seen_in_blocks(numbers)[:, -count:], positions[:, -count:], wanted, kept.cache
        )
        # The open block changes at the next step.
        cache.crop(-block)
        kept.finished, kept.cache = x[:, :start].clone(), cache
        return found

    def _found(self, frames: tuple[Frame, ...], finished: Tensor) -> _Kept:
        """What is kept of rows with these finished blocks, or with all of them but the last; else an empty entry."""
        block, last = self.language.block or 1, finished.shape[1]
        # What lies two blocks behind is of states that have moved on or have no children.
        self._kept = {
            key: [entry for entry in kept if entry.finished.shape[1] >= last - block]
            for key, kept in self._kept.items()
        }
        entries = self._kept.setdefault(tuple(map(id, frames)), [])
        for size in (last, last - block):
            for entry in entries:
                if entry.finished.shape[1] == size and torch.equal(entry.finished, finished[:, :size]):
                    return entry
        device, width = finished.device, max(len(head) for head, _ in frames)
        starts = torch.tensor([len(head) for head, _ in frames], device=device)[:, None]
        number = torch.div(torch.arange(width, device=device) - starts, block, rounding_mode="floor")
        # The padding stands between a prompt and its completion, so its block is one that nothing sees.
        entries.append(_Kept(frames, finished[:, :0], number.masked_fill(number >= 0, 2**30), None))
        return entries[-1]

    def _heads(self, frames: Sequence[Frame]) -> Tensor:
        width = max(len(head) for head, _ in frames)
        rows = [[*head, *[self.language.pad] * (width - len(head))] for head, _ in frames]
        return torch.tensor(rows, device=next(self.language.model.parameters()).device)
