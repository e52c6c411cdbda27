"""Completions that are written block after block: which block is open, and which tokens a token sees."""

from __future__ import annotations

import torch
from torch import Tensor


def open_block(masked: Tensor, block: int) -> Tensor:
    """[N, block] places of the first block that has a mask; the last block of a row without masks.

    Args:
        masked: [N, L] bool: where a completion has masks; L is a multiple of `block`.
        block: places of a block.
    """
    count = masked.shape[1] // block
    has = masked.view(len(masked), count, block).any(2)
    first = torch.where(has.any(1), has.int().argmax(1), count - 1)
    return first[:, None] * block + torch.arange(block, device=masked.device)


def seen_in_blocks(number: Tensor, noised: Tensor | None = None, *, last: int | None = None) -> Tensor:
    """[N, W, W] bool: whether token q sees token k, as block diffusion has it (BD3-LM, arXiv 2503.09573, §3).

    A token sees the tokens of its own block and of all blocks before it. If rows hold a second copy of some blocks,
    with masks in it, then a token of a copy sees its own block of the copy, and the first form of all blocks before it.
    So one pass evaluates all blocks at once, each as if it were the block that is being written.

    Args:
        number: [N, W] number of each token's block; blocks of the prompt have negative numbers.
        noised: [N, W] bool: the tokens of copies; None if there are none.
        last: if given, only the last tokens of a row see, [N, last, W]; not with copies.
    """
    query, key = number[:, 0 if last is None else -last :, None], number[:, None, :]
    if noised is None:
        return key <= query
    of_copy, in_copy = noised[:, :, None], noised[:, None, :]
    return torch.where(in_copy, of_copy & (query == key), key <= query - of_copy.long())
