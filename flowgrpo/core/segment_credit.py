"""Advantages of the segments of completions: by values of the places where they are cut, or by rewards of segments.

A cut is a number of tokens, above 0 and below the length of the completion. K cuts make K + 1 segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .advantages import as_precise
from .part_credit import part_advantages


def by_segment(
    values: Sequence[Sequence[float]], cuts: Sequence[Sequence[int]], lengths: Sequence[int] | Tensor
) -> Tensor:
    """[N, T] the value of the segment of each token; 0 after the end.

    Args:
        values: N lists, one value for each segment.
        cuts: N lists of rising numbers of tokens at which a completion is cut.
        lengths: [N] numbers of tokens.

    Raises:
        ValueError: a completion does not have one value more than cuts, or a cut is not within the completion.
    """
    counts = [int(length) for length in lengths]
    found = torch.zeros(len(counts), max(counts, default=0))
    for row, (own, places, length) in enumerate(zip(values, cuts, counts, strict=True)):
        bounds = [0, *places, length]
        if len(own) != len(places) + 1 or any(not low < high for low, high in pairwise(bounds)):
            raise ValueError(
                f"completion {row} has {length} tokens, cuts {list(places)} and {len(own)} values; give rising cuts "
                "within the completion, and one value for each segment"
            )
        for value, (low, high) in zip(own, pairwise(bounds)):
            found[row, low:high] = value
    return found


def segment_advantages(
    rewards: Sequence[float],
    first: Sequence[float],
    cuts: Sequence[Sequence[int]],
    values: Sequence[Sequence[float]],
    lengths: Sequence[int] | Tensor,
) -> Tensor:
    """What each segment gained: A = V(end of the segment) - V(its beginning) (SPO, arXiv 2505.23564).

    VinePPO (arXiv 2410.01679) has the same advantage for the steps of a solution. A value is the mean reward of
    completions that were continued from the cut, so there is no critic. The value at the end of a completion is its
    reward. The advantages of a completion's segments add up to its reward minus the value of the prompt.

    Args:
        rewards: [N].
        first: [N] values of the prompts.
        cuts: N lists of rising numbers of tokens.
        values: N lists, the value at each cut.
        lengths: [N] numbers of tokens.

    Returns:
        [N, T]; 0 after the end, and NaN where a value is NaN.

    Raises:
        ValueError: As in `by_segment`.
    """
    gains = [
        [after - before for before, after in pairwise([start, *own, reward])]
        for reward, start, own in zip(rewards, first, values, strict=True)
    ]
    return by_segment(gains, cuts, lengths)


def gain_advantages(
    steps: Tensor,
    groups: Tensor | Sequence[int],
    *,
    gamma: float = 1.0,
    scale: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """Discounted sums of later rewards, after all rewards of the group were compared (IGPO, arXiv 2510.14967).

    The reward of a segment is compared with the rewards of all segments of the group: a = (r - mean) / std. The
    advantage of segment t is the sum over k >= t of gamma^(k - t) a_k.

    Args:
        steps: [N, K] rewards of segments; NaN where a row has no k-th segment, or its reward is unknown.
        groups: [N] integer ids.
        gamma: discount per segment.
        scale: "group" or "none".
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        [N, K]; a segment without a reward has what follows.

    Raises:
        ValueError: As in `part_advantages`.
    """
    compared = as_precise(part_advantages(steps, groups, among="group", scale=scale, eps=eps, ddof=ddof))
    place = torch.arange(compared.shape[1], device=compared.device)
    weights = (gamma ** as_precise(place[:, None] - place).clamp(min=0)).tril()
    return (compared @ weights).float()
