"""How many samples each prompt gets, when the total is fixed.

Plain numbers in and out: this is decided between steps, from statistics that are on the host already.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

Gain = Callable[[float, int], float]
"""`gain(statistic, n)`: what sample n + 1 of a prompt adds, never rising with n."""


def knapsack_gain(rate: float, n: int) -> float:
    """What one more sample adds to `p (1 - p)^2 (1 - p^n - (1 - p)^n)` (Knapsack RL, arXiv 2509.25849).

    The value of n samples of a prompt with success rate p is the probability that the group has a gradient, both a
    success and a failure among n, times what an update may bring: p (1 - p) as spread of the reward, and 1 - p left
    to learn.

    Args:
        rate: success rate p in [0, 1].
        n: samples the prompt has, at least 1.

    Raises:
        ValueError: If `rate` is not in [0, 1].
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"a success rate is {rate}; use numbers in [0, 1]")
    miss = 1 - rate
    return rate * miss**2 * (rate**n * miss + miss**n * rate)


def interval_gain(std: float, n: int, *, bonus: float = 0.0) -> float:
    """How much a sample narrows the interval of a prompt's mean reward (XRPO, arXiv 2510.06672).

    std (1 / sqrt(n) - 1 / sqrt(n + 1)) + bonus / sqrt(n). The factor of Student's t is left out, as one for all;
    for the paper's exploration bonus give lambda sqrt(log(1 + samples so far)).

    Args:
        std: standard deviation of the prompt's rewards.
        n: samples the prompt has, at least 1.
        bonus: weight of a prompt's being sampled little.
    """
    return std * (1 / math.sqrt(n) - 1 / math.sqrt(n + 1)) + bonus / math.sqrt(n)


def variance_gain(std: float, n: int) -> float:
    """How much a sample lowers the variance of the mean, std^2 / n - std^2 / (n + 1): sizes in proportion to std.

    Neyman's allocation in whole numbers; the variance of the step's mean reward is the least possible.

    Args:
        std: standard deviation of the prompt's rewards.
        n: samples the prompt has, at least 1.
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

    Every sample in turn goes where it adds most, which is the optimum of the knapsack, as a gain never rises with
    n. Where gains are equal (prompts never or always solved have none at all) the prompt with fewer samples is
    served first, so what is left over is spread evenly.

    Args:
        statistics: one number per prompt: its success rate for `knapsack_gain`, else the standard deviation of its
            rewards (sqrt(p (1 - p)) for 0/1 rewards).
        budget: samples in all.
        gain: what sample n + 1 adds; see `GAINS`.
        least: samples of every prompt, at least 1.
        most: samples of a prompt at most, None for no limit.

    Returns:
        Samples per prompt; they add up to `budget`.

    Raises:
        ValueError: a budget that cannot be met, a statistic that is not finite, or limits out of order.
    """
    count = len(statistics)
    ceiling = budget if most is None else most
    if not (least >= 1 and (most is None or least <= most)):
        raise ValueError(f"least={least}, most={most}; use 1 <= least <= most")
    if not count * least <= budget <= count * ceiling:
        limit = "or more" if most is None else f"to {count * most}"
        raise ValueError(f"`budget` is {budget}, but {count} prompts of `least` {least} take {count * least} {limit}")
    if not all(math.isfinite(s) for s in statistics):
        raise ValueError("`statistics` holds a value that is not finite; give prompts without a history a guess")
    sizes = [least] * count
    queue = [(-gain(statistic, least), least, i) for i, statistic in enumerate(statistics) if least < ceiling]
    heapq.heapify(queue)
    for _ in range(budget - count * least):
        _, n, i = heapq.heappop(queue)
        sizes[i] = n + 1
        if n + 1 < ceiling:
            heapq.heappush(queue, (-gain(statistics[i], n + 1), n + 1, i))
    return sizes
