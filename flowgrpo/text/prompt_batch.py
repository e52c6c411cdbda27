"""Prompts of a language model in one batch: padding, positions, and the pictures that they show."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .pictured import PicturedIds


class PromptBatch:
    """P prompts in one batch, padded on the left.

    Args:
        prompts: P lists of token ids; those that show pictures are `PicturedIds`.
        pad: token for padding.
        device: of the model.
        dtype: of the model.

    Attributes:
        ids: [P, L].
        mask: [P, L], 1 where there is a token.
        shift: [A, P] what a position after the prompt is more than the number of tokens before it, on each of A axes;
            None if positions count tokens.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], pad: int, device: torch.device, dtype: torch.dtype) -> None:
        self.prompts, self._device, self._dtype = prompts, device, dtype
        width = max(map(len, prompts))
        self.ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in prompts], device=device)
        self.mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device)
        self._pictured = [row for row in prompts if isinstance(row, PicturedIds)]
        self._places = [row.places if isinstance(row, PicturedIds) else None for row in prompts]
        self.shift: Tensor | None = None
        if any(places is not None for places in self._places):
            after = [0 if places is None else int(places.max()) + 1 - places.shape[1] for places in self._places]
            axes = max(len(places) for places in self._places if places is not None)
            self.shift = torch.tensor(after, device=device).repeat(axes, 1)

    def positions(self) -> Tensor:
        """[P, L] positions of the tokens, or [A, P, L] with A axes."""
        counted = positions_of(self.mask)
        if self.shift is None:
            return counted
        found = counted.expand(len(self.shift), *counted.shape).clone()
        for k, places in enumerate(self._places):
            if places is not None:
                found[:, k, found.shape[2] - places.shape[1] :] = places.to(found)
        return found

    def inputs(self, rows: Sequence[int] | None = None, further: int = 0) -> dict[str, Tensor]:
        """Arguments of the model's call for the pictures of the prompts; none for prompts without pictures.

        Args:
            rows: prompts, some of them several times; each once if left out.
            further: how many tokens of a completion follow.
        """
        if not self._pictured:
            return {}
        chosen = self.prompts if rows is None else [self.prompts[row] for row in rows]
        shown = [row for row in chosen if isinstance(row, PicturedIds)]
        if not shown:
            return {}
        found: dict[str, Tensor] = {}
        for name in self._pictured[0].inputs:
            joined = _joined([row.inputs[name] for row in shown]).to(self._device)
            found[name] = joined.to(self._dtype) if joined.is_floating_point() else joined
        width = self.ids.shape[1] + further
        for name, first in self._pictured[0].kinds.items():
            kinds = torch.zeros(len(chosen), width, dtype=first.dtype)
            for k, row in enumerate(chosen):
                if isinstance(row, PicturedIds):
                    end = width - further
                    kinds[k, end - len(row) : end] = row.kinds[name]
            found[name] = kinds.to(self._device)
        return found


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other. Pictures of several sizes are padded with zeros, as processors pad a batch."""
    size = [max(part.shape[k] for part in parts) for k in range(1, parts[0].dim())]
    padded = []
    for part in parts:
        more = [(0, want - have) for want, have in zip(size, part.shape[1:])]
        padded.append(torch.nn.functional.pad(part, [n for pair in reversed(more) for n in pair]))
    return torch.cat(padded)


def positions_of(mask: Tensor) -> Tensor:
    """Position ids [B, L] that count only the tokens inside the mask [B, L]."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def positions_after(mask: Tensor, shift: Tensor | None, last: int) -> Tensor:
    """[B, last] positions of the last tokens of rows, which follow a prompt, or [A, B, last] with A axes.

    Args:
        mask: [B, L], 1 where there is a token.
        shift: [A, B] see `PromptBatch`, or None.
        last: how many tokens.
    """
    counted = positions_of(mask)[:, mask.shape[1] - last :]
    if shift is None:
        return counted
    return counted + shift[:, :, None]
