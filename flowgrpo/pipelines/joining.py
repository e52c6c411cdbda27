"""Batches of prompt embeddings, put together from embeddings of single prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """How one output of `encode_prompt` is batched.

    Attributes:
        kind: "rows" (tensor, one row a prompt along `dim`), "mask" (None for one prompt, a validity mask
            [B, L] for prompts of different lengths), "list" (one item a prompt), "sums" (0 and the cumulative sums of
            the lengths, [B + 1]), "each" (a container with a layout for each item), "shared" (one value for all
            prompts). If a pipeline class leaves out the rows of some prompts, the rows count as a mask. A prompt that
            has a mask keeps it.
        dim: the batch dimension of "rows" and "mask".
        dtype: the dtype of "rows" and "mask".
        parts: the layouts of the items of "each".
    """

    kind: str
    dim: int = 0
    dtype: torch.dtype = torch.bool
    parts: tuple[Layout, ...] = ()


def layout_of(one: Any, two: Any) -> Layout:
    """The layout of an output, found by comparing the outputs for a batch of one and a batch of two."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        if one.shape == (2,) and two.shape == (3,) and not one.is_floating_point() and one[0] == two[0] == 0:
            return Layout("sums")
        for dim, (a, b) in enumerate(zip(one.shape, two.shape)):
            if (a, b) == (1, 2):
                return Layout("rows", dim, two.dtype)
    elif one is None and isinstance(two, Tensor):
        return Layout("mask", list(two.shape).index(2), two.dtype)
    elif isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        if (len(one), len(two)) == (1, 2):
            return Layout("list")
        return Layout("each", parts=tuple(layout_of(a, b) for a, b in zip(one, two)))
    return Layout("shared")


def joined(layout: Layout, entries: Sequence[Any]) -> Any:
    """Join the outputs for single prompts into the output for their batch."""
    if layout.kind == "rows":
        return _concatenated(entries, layout.dim)
    if layout.kind == "list":
        return [item for entry in entries for item in entry]
    if layout.kind == "shared":
        return _shared(entries)
    if layout.kind == "sums":
        each = torch.cat([entry.diff() for entry in entries])
        return torch.cat([entries[0][:1], each.cumsum(0).to(each.dtype)])
    if layout.kind == "mask":
        return _mask(layout, entries, [])
    parts: list[Any] = []
    lengths: list[int] = []
    for k, part in enumerate(layout.parts):
        column = [entry[k] for entry in entries]
        if part.kind == "mask" or (part.kind == "rows" and any(entry is None for entry in column)):
            parts.append(_mask(part, column, lengths))
            continue
        if part.kind == "rows":
            lengths = _lengths(column, part.dim, lengths)
        parts.append(joined(part, column))
    return type(entries[0])(parts) if isinstance(entries[0], (list, tuple)) else parts


def _lengths(rows: Sequence[Tensor], dim: int, before: list[int]) -> list[int]:
    """Lengths of single prompts: the sizes of their rows in the first dimension in which they differ.

    A pooled embedding has no dimension of length, so it does not change what is known from `before`.
    """
    sizes = list(zip(*(row.shape for row in rows)))
    differing = [list(each) for d, each in enumerate(sizes) if d != dim and len(set(each)) > 1]
    return differing[0] if differing else before if len(sizes) < 3 else []


def _mask(layout: Layout, entries: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor | None:
    """The mask of a batch: the masks of single prompts, with ones for a prompt that has none.

    None if no prompt has a mask and all have the same length. A pipeline class may leave out the mask of a prompt
    without padding, and still pad other prompts, for example to a multiple of eight.
    """
    own = [entry for entry in entries if entry is not None]
    if len(set(lengths)) <= 1:
        return torch.cat([torch.ones_like(own[0]) if e is None else e for e in entries], layout.dim) if own else None
    device = own[0].device if own else None
    rows = [
        torch.ones(1, length, dtype=layout.dtype, device=device) if e is None else e
        for e, length in zip(entries, lengths)
    ]
    return _concatenated(rows, layout.dim)


def _concatenated(rows: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate along `dim`. Rows that are shorter in another dimension are padded with zeros (False) at the end."""
    if len({row.shape for row in rows}) == 1:
        return torch.cat(list(rows), dim)
    longest = [max(sizes) for sizes in zip(*(row.shape for row in rows))]
    padded = []
    for row in rows:
        missing = [0 if d == dim else longest[d] - row.shape[d] for d in range(row.ndim)]
        pad = [amount for d in reversed(range(row.ndim)) for amount in (0, missing[d])]
        padded.append(nn.functional.pad(row, pad) if any(missing) else row)
    return torch.cat(padded, dim)


def _shared(entries: Sequence[Any]) -> Any:
    """The longest of outputs that are equal for all prompts, except that an output may be as long as its prompt."""
    tensors = [entry for entry in entries if isinstance(entry, Tensor)]
    if not tensors:
        return entries[0]
    longest = max(tensors, key=lambda tensor: tensor.numel())
    for tensor in tensors:
        if not torch.equal(tensor, longest[tuple(slice(size) for size in tensor.shape)]):
            raise ValueError("encode_prompt returned an output that is not batched, yet differs between prompts")
    return longest
