"""Statistics of scores: their distribution, the share of a group's spread that is noise, and how far rewards agree.

Scores are float64. A score is NaN where a reward does not apply, and every function leaves such samples out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Distribution:
    """The distribution of B scores.

    Attributes:
        count, absent: number of scores that are numbers, and number of scores that are NaN.
        mean, std, low, q05, median, q95, high: statistics of the numbers; `low` is the least, `high` the greatest.
        distinct: number of different values.
        within: root of the mean variance within groups of two or more.
        flat_groups: share of those groups in which all scores are equal; NaN without such groups.
        commonest: share of the most frequent value.
    """

    count: int
    absent: int
    mean: float
    std: float
    low: float
    q05: float
    median: float
    q95: float
    high: float
    distinct: int
    within: float
    flat_groups: float
    commonest: float


def describe(values: Tensor, groups: Sequence[int]) -> Distribution:
    """The distribution of scores [B] in groups [B]; if no score is a number, the statistics are NaN."""
    known = values[~values.isnan()]
    if not len(known):
        nan = math.nan
        return Distribution(0, len(values), nan, nan, nan, nan, nan, nan, nan, 0, nan, nan, nan)
    low, q05, median, q95, high = torch.quantile(known, torch.tensor([0, 0.05, 0.5, 0.95, 1], dtype=known.dtype))
    _, sizes = known.unique(return_counts=True)
    parts = [part for part in _parts(groups, values) if len(values[part]) > 1]
    flat = [float(values[part].max() == values[part].min()) for part in parts]
    return Distribution(
        count=len(known),
        absent=len(values) - len(known),
        mean=known.mean().item(),
        std=known.std().item() if len(known) > 1 else 0.0,
        low=low.item(),
        q05=q05.item(),
        median=median.item(),
        q95=q95.item(),
        high=high.item(),
        distinct=len(sizes),
        within=within_spread(values, groups),
        flat_groups=sum(flat) / len(flat) if flat else math.nan,
        commonest=sizes.max().item() / len(known),
    )


def within_spread(values: Tensor, groups: Sequence[int]) -> float:
    """Root of the mean variance within the groups of two or more; NaN if there is none."""
    variances = [values[part].var() for part in _parts(groups, values) if len(part) > 1]
    return torch.stack(variances).mean().sqrt().item() if variances else math.nan


def noise_share(versions: Tensor, groups: Sequence[int]) -> float:
    """How much of the spread within groups is due to changes that should not matter.

    One minus the intraclass correlation ICC(3,1) for consistency (Shrout and Fleiss 1979), from mean squares pooled
    over groups. In each group the scores are a table of n samples in V versions. A constant that a version adds to all
    samples of the group is no noise, since it does not change an advantage:

        noise = E / (S + E),    E = MS_error,    S = max(0, (MS_samples - MS_error) / V)

    Args:
        versions: [B, V], a sample's scores in V versions that look alike.
        groups: B group ids.

    Returns:
        A share in [0, 1]; NaN if no group of two or more has any spread.
    """
    between = within = 0.0
    samples = errors = 0
    number = versions.shape[1]
    for part in _parts(groups, versions.sum(1)):
        table = versions[part]
        if len(table) < 2:
            continue
        rows, columns, mean = table.mean(1, keepdim=True), table.mean(0, keepdim=True), table.mean()
        between += number * (rows - mean).square().sum().item()
        within += (table - rows - columns + mean).square().sum().item()
        samples += len(table) - 1
        errors += (len(table) - 1) * (number - 1)
    if not samples or between + within == 0:
        return math.nan
    error = within / errors
    signal = max(0.0, (between / samples - error) / number)
    return error / (signal + error)


def order_kept(first: Tensor, second: Tensor, groups: Sequence[int]) -> float:
    """Share of the pairs within a group that `second` orders as `first` does; 1/2 is chance.

    A pair with equal scores in `first` does not count. A pair with equal scores only in `second` counts 1/2.

    Returns:
        A share in [0, 1]; NaN if `first` tells no two samples of a group apart.
    """
    kept, pairs = 0.0, 0
    for part in _parts(groups, first + second):
        one, other = (values[part].unsqueeze(0) - values[part].unsqueeze(1) for values in (first, second))
        upper = (one > 0).nonzero(as_tuple=True)
        agree = other[upper].sign()
        kept += (0.5 + 0.5 * agree).sum().item()
        pairs += len(agree)
    return kept / pairs if pairs else math.nan


def order_shared(first: Tensor, second: Tensor, groups: Sequence[int]) -> tuple[float, int]:
    """Share of the pairs within a group that `first` and `second` put in the same order; 1/2 is chance.

    A pair counts if both scores tell its samples apart. So the share is the same with `first` and `second` exchanged.

    Returns:
        A share in [0, 1], NaN if no pair counts; and the number of pairs that count.
    """
    alike = pairs = 0
    for part in _parts(groups, first + second):
        one, other = (values[part].unsqueeze(0) - values[part].unsqueeze(1) for values in (first, second))
        signs = other[(one > 0) & (other != 0)].sign()
        alike += int((signs > 0).sum())
        pairs += len(signs)
    return (alike / pairs if pairs else math.nan), pairs


def correlations(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Pearson's and Spearman's correlation over the samples that both score; NaN where one of them is constant."""
    from scipy import stats

    both = ~(first.isnan() | second.isnan())
    one, other = first[both].numpy(), second[both].numpy()
    if len(one) < 3:
        return math.nan, math.nan
    with warnings.catch_warnings():
        # scipy warns about a constant input and returns NaN, and NaN is the right answer here.
        warnings.simplefilter("ignore")
        return float(stats.pearsonr(one, other).statistic), float(stats.spearmanr(one, other).statistic)


def farthest(first: Tensor, second: Tensor) -> float:
    """Largest distance between a sample's two scores; infinite if only one of them is a number, 0 if all are NaN."""
    if bool((first.isnan() != second.isnan()).any()):
        return math.inf
    gaps = (first - second).abs()
    return gaps[~gaps.isnan()].max().item() if bool((~gaps.isnan()).any()) else 0.0


def _parts(groups: Sequence[int], values: Tensor) -> Iterator[list[int]]:
    """Rows of each group whose values are numbers."""
    members: dict[int, list[int]] = {}
    for row, (group, absent) in enumerate(zip(groups, values.isnan().tolist(), strict=True)):
        if not absent:
            members.setdefault(group, []).append(row)
    yield from members.values()
