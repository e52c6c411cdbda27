"""The number of samples for each prompt when the total is fixed.

The functions take and return plain numbers: sizes are decided between steps, from statistics that are already on the
host.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

Gain = Callable[[float, int], float]
"""`gain(statistic, n)`: the value that sample n + 1 of a prompt adds. It must never rise with n."""


def knapsack_gain(rate: float, n: int) -> float:
    """The value that one more sample adds to `p (1 - p)^2 (1 - p^n - (1 - p)^n)` (Knapsack RL, arXiv 2509.25849).

    The value of n samples of a prompt with success rate p has two factors. One is the probability that the group has a
    gradient, which needs a success and a failure among the n samples. The other is what an update may bring: p (1 - p),
    the spread of the reward, times 1 - p, the part that is left to learn.

    Args:
        rate: success rate p in [0, 1].
        n: number of samples that the prompt already has, at least 1.

    Raises:
        ValueError: If `rate` is not in [0, 1].
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"a success rate is {rate}; use numbers in [0, 1]")
    miss = 1 - rate
    return rate * miss**2 * (rate**n * miss + miss**n * rate)


def interval_gain(std: float, n: int, *, bonus: float = 0.0) -> float:
    """How much a sample narrows the interval of a prompt's mean reward (XRPO, arXiv 2510.06672).

    std (1 / sqrt(n) - 1 / sqrt(n + 1)) + bonus / sqrt(n). The factor of Student's t is left out because it is the same
    for all prompts. For the paper's exploration bonus, give lambda sqrt(log(1 + samples so far)).

    Args:
        std: standard deviation of the prompt's rewards.
        n: number of samples that the prompt already has, at least 1.
        bonus: weight of the term that favours prompts with few samples.
    """
    return std * (1 / math.sqrt(n) - 1 / math.sqrt(n + 1)) + bonus / math.sqrt(n)


def variance_gain(std: float, n: int) -> float:
    """How much a sample lowers the variance of the mean: std^2 / n - std^2 / (n + 1).

    This is Neyman's allocation in whole numbers: sizes are in proportion to std, and the variance of the step's mean
    reward is the least possible.

    Args:
        std: standard deviation of the prompt's rewards.
        n: number of samples that the prompt already has, at least 1.
    """
    return std**2 / (n * (n + 1))


GAINS: dict[str, Gain] = {"knapsack": knapsack_gain, "interval": interval_gain, "variance": variance_gain}


def allocate(
    statistics: Sequence[float],
    budget: int,
    gain: Gain = knapsack_gain,
    *,
    least: int = 1,
    most: int | None = None,
) -> list[int]:
    """Share `budget` samples among prompts so that the sum of their values is greatest.

    Each sample in turn goes to the prompt where it adds most. This is the optimum of the knapsack, because a gain never
    rises with n. Where gains are equal, the prompt with fewer samples comes first, so the remaining samples are spread
    evenly. (Prompts that are never or always solved have a gain of 0.)

    Args:
        statistics: one number per prompt: its success rate for `knapsack_gain`, else the standard deviation of its
            rewards (sqrt(p (1 - p)) for 0/1 rewards).
        budget: samples in all.
        gain: the value that sample n + 1 adds; see `GAINS`.
        least: smallest number of samples of a prompt, at least 1.
        most: largest number of samples of a prompt; None for no limit.

    Returns:
        Samples per prompt; they add up to `budget`.

    Raises:
        ValueError: if the budget cannot be met, a statistic is not finite, or limits are out of order.
    """
    count = len(statistics)
    ceiling = budget if most is None else most
    if not (least >= 1 and (most is None or least <= most)):
        raise ValueError(f"least={least}, most={most}; use 1 <= least <= most")
    if not count * least <= budget <= count * ceiling:
        limit = "or more" if most is None else f"to {count * most}"
        raise ValueError(f"`budget` is {budget}, but {count} prompts of `least` {least} take {count * least} {limit}")
    if not all(math.isfinite(s) for s in statistics):
        raise ValueError("`statistics` holds a value that is not finite; give a guess for prompts that have no history")
    sizes = [least] * count
    queue = [(-gain(statistic, least), least, i) for i, statistic in enumerate(statistics) if least < ceiling]
    heapq.heapify(queue)
    for _ in range(budget - count * least):
        _, n, i = heapq.heappop(queue)
        sizes[i] = n + 1
        if n + 1 < ceiling:
            heapq.heappush(queue, (-gain(statistics[i], n + 1), n + 1, i))
    return sizes
