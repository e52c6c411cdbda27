"""The confidence interval of a share."""

import math
from statistics import NormalDist


def wilson(wins: float, count: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return the score interval of a proportion (Wilson 1927): all p with |wins/count - p| ≤ z √(p (1 - p) / count).

    Unlike the normal interval around the mean, it stays within [0, 1], and keeps its confidence level for few votes and
    for rates near 0 and 1. Without votes, the interval is (0, 1).
    """
    if not count:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = wins / count
    middle = share + z * z / (2 * count)
    reach = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    whole = 1 + z * z / count
    return max(0.0, (middle - reach) / whole), min(1.0, (middle + reach) / whole)
