"""Rewards by group, as columns: the code that `baselines`, `outcomes` and `trackers` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .advantages import GroupMoments, as_precise, group_index, group_moments


@dataclass(frozen=True)
class Grouped:
    """Rewards as precise columns, and the group of each row."""

    values: Tensor  # [N, K], NaN where a reward does not apply
    index: Tensor  # [N] in 0..M-1
    count: int  # M
    shape: torch.Size  # the original shape of the rewards
    dtype: torch.dtype  # the dtype of the result, float32 at least

    def moments(self, ddof: int) -> GroupMoments:
        return group_moments(self.values, self.index, self.count, ddof)

    def restore(self, columns: Tensor) -> Tensor:
        """Columns [N, K] in the shape and type of the rewards, 0 where the reward is NaN."""
        return torch.where(self.values.isnan(), 0.0, columns).to(self.dtype).reshape(self.shape)


def grouped(rewards: Tensor, groups: Tensor | Sequence[int], name: str = "rewards") -> Grouped:
    """Split `rewards` [B] or [B, ...] into columns and number their groups; an error calls them `name`.

    Raises:
        ValueError: If `rewards` is a scalar, a reward is infinite, or there is not one group id per row.
    """
    if rewards.dim() == 0:
        raise ValueError(f"`{name}` is a scalar; give one value per row, shape (B,)")
    values = as_precise(rewards)
    values = values[:, None] if values.dim() == 1 else values.flatten(1)
    if bool(values.isinf().any()):
        raise ValueError(f"`{name}` holds an infinite value; use NaN where there is no value")
    index, count = group_index(groups, len(values), values.device)
    return Grouped(values, index, count, rewards.shape, torch.promote_types(rewards.dtype, torch.float32))


def one_per_row(values: Tensor, rows: int, name: str) -> Tensor:
    """`values`, after a check that its shape is [rows]."""
    if values.shape != (rows,):
        raise ValueError(f"`{name}` has shape {tuple(values.shape)}; give one value per row, shape ({rows},)")
    return values


def cells(index: Tensor, ids: Tensor | Sequence[int], name: str) -> tuple[Tensor, int]:
    """Number the pairs of a group `index` [N] and an id of `ids` [N]: (index [N] in 0..P-1, P)."""
    inner = one_per_row(torch.as_tensor(ids, device=index.device), len(index), name)
    position, count = group_index(inner, len(index), index.device)
    return group_index(index * count + position, len(index), index.device)


def standardised(values: Tensor, index: Tensor, moments: GroupMoments, eps: float) -> Tensor:
    """(value - mean) / (std + eps) of `values` [N, K]; 0 where a value is NaN or all values of its group are equal."""
    silent = values.isnan() | moments.degenerate[index]
    centred = values - moments.minimum[index] - moments.offset[index]
    return torch.where(silent, 0.0, centred / (moments.std[index] + eps))
