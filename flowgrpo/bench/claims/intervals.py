"""Intervals of Student's t: of a mean, and of the ratio of two means; and how many values would decide a question."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

MOST = 999
"""More values than this are not counted."""


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval, unbounded for a single value."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        """The interval of one or more independent values, by Student's t; unbounded if one of them is no number."""
        found = list(values)
        mean = statistics.fmean(found)
        if len(found) == 1 or not math.isfinite(mean):
            return cls(mean, -math.inf, math.inf, len(found))
        half = float(student.ppf(0.975, len(found) - 1)) * statistics.stdev(found) / math.sqrt(len(found))
        return cls(mean, mean - half, mean + half, len(found))

    def at_most(self, bound: float) -> bool | None:
        """Whether the interval lies at or below a bound; None if the bound is inside."""
        return True if self.high <= bound else False if self.low > bound else None

    def at_least(self, bound: float) -> bool | None:
        """Whether the interval lies at or above a bound; None if the bound is inside."""
        return True if self.low >= bound else False if self.high < bound else None

    def side(self, bound: float, least: bool) -> bool | None:
        """`at_least` or `at_most`."""
        return self.at_least(bound) if least else self.at_most(bound)

    def rounded(self, digits: int) -> Interval:
        """The interval as it is shown with this number of digits after the point."""
        mean, low, high = (float(f"{value:.{digits}f}") for value in (self.mean, self.low, self.high))
        return Interval(mean, low, high, self.count)

    def text(self, form: str = "+.3f") -> str:
        """The interval as `mean [low, high]`."""
        if not math.isfinite(self.mean):
            return "no number"
        mean, low, high = (_without_negative_zero(value, form) for value in (self.mean, self.low, self.high))
        return f"{mean} (one value)" if self.count == 1 else f"{mean} [{low}, {high}]"


def _without_negative_zero(value: float, form: str) -> str:
    text = f"{value:{form}}".replace("-", "−")
    return text if text.strip("−+0.%") else f"{0.0:{form}}"


def shares(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Interval of the ratio of two means of paired values, by Fieller's theorem.

    The interval has the ratios r for which the mean of `ours − r · theirs` is compatible with 0 by Student's t. So a
    test of a share and its interval always agree. The interval is unbounded unless `theirs` is clearly above 0.
    """
    count, top, below = len(ours), statistics.fmean(ours), statistics.fmean(theirs)
    middle = top / below if below else math.nan
    if count < 2 or not math.isfinite(middle):
        return Interval(middle, -math.inf, math.inf, count)
    t2 = float(student.ppf(0.975, count - 1)) ** 2 / count
    covariance = np.cov(ours, theirs)
    a = below**2 - t2 * covariance[1, 1]
    b = below * top - t2 * covariance[0, 1]
    c = top**2 - t2 * covariance[0, 0]
    if a <= 0 or below <= 0:
        return Interval(middle, -math.inf, math.inf, count)
    half = math.sqrt(max(b**2 - a * c, 0.0)) / a
    return Interval(middle, b / a - half, b / a + half, count)


def needed(values: Sequence[float], bound: float) -> int | None:
    """How many values like these decide on which side of a bound their mean lies; None if over `MOST` or unknown."""
    found = list(values)
    if len(found) < 2 or not all(map(math.isfinite, found)):
        return None
    away, spread = abs(statistics.fmean(found) - bound), statistics.stdev(found)
    if not away:
        return None
    for count in range(2, MOST + 1):
        if float(student.ppf(0.975, count - 1)) * spread <= away * math.sqrt(count):
            return count
    return None
