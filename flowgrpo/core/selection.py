"""Which samples of a group enter the gradient; all of them enter the statistics."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .advantages import group_index, sum_by_group
from .subsets import rank_in_group

CHOICES = ("extremes", "best")


def select(values: Tensor, groups: Tensor | Sequence[int], keep: int, *, choice: str = "extremes") -> Tensor:
    """Keep `keep` samples of each group: the best and the worst, or the best.

    "extremes" is DanceGRPO's best-of-n (arXiv 2505.07818): half of `keep` from the top, half from the bottom. If `keep`
    is odd, the top gets one more. "best" is BranchGRPO's width pruning (2509.06040) if the siblings of a split are the
    groups.

    Args:
        values: [N] values that rank the samples; NaN is never kept. Among equal values, the earlier sample ranks lower.
        groups: [N] integer ids.
        keep: Samples to keep, at least 1; smaller groups are kept completely.
        choice: "extremes" or "best".

    Returns:
        [N] bool.

    Raises:
        ValueError: For an unknown `choice`, a `keep` below 1, or shapes that do not match.
    """
    if choice not in CHOICES:
        raise ValueError(f"`choice` is {choice!r}; use one of {', '.join(CHOICES)}")
    if keep < 1:
        raise ValueError(f"`keep` is {keep}; keep at least 1 sample of a group")
    if values.dim() != 1:
        raise ValueError(f"`values` has shape {tuple(values.shape)}; give one value per sample, (N,)")
    index, count = group_index(groups, len(values), values.device)
    valid = ~values.isnan()
    rank = rank_in_group(values, index, count)
    present = sum_by_group(valid[:, None].long(), index, count)[:, 0][index]
    bottom = keep // 2 if choice == "extremes" else 0
    chosen = (rank >= present - (keep - bottom)) | (rank < bottom)
    return chosen & valid
