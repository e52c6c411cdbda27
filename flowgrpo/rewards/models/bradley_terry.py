"""The preference model of Bradley and Terry on features of two things, fitted with a quadratic penalty.

With features x_a and x_b, a is preferred to b with probability σ(w·(x_a - x_b)) (Bradley and Terry, "Rank Analysis of
Incomplete Block Designs", 1952). There is no constant, so neither side is favoured. A tie counts as half a choice for
each side. With the penalty, the loss is strictly convex. So it has exactly one solution, which does not depend on the
order of the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve
from scipy.special import expit
from scipy.stats import norm
from scipy.stats import t as student

from ...votes.interval import wilson

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
PENALTIES = (100.0, 31.6, 10.0, 3.16, 1.0, 0.316, 0.1)
"""Penalties to try if none is given. The largest comes first, so it is chosen unless a smaller one is better."""
FOLDS, INNER_FOLDS = 10, 5
_STEPS = 100
_CLOSE = 1e-13
_ENOUGH = 0.25
_UPPER = 0.975
"""The quantile at the upper end of an interval of 95 %."""


@dataclass(frozen=True)
class Pairs:
    """N different pairs.

    Attributes:
        differences: [N, D] features of the first side minus those of the second.
        firsts: [N] how often the first side was preferred.
        seconds: [N] how often the second side was preferred.
        ties: [N] how often neither side was preferred.
        units: [N] whole numbers; pairs with the same number are held out together.
    """

    differences: Array
    firsts: Array
    seconds: Array
    ties: Array
    units: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.firsts)

    @property
    def wins(self) -> Array:
        """[N] how often the first side was preferred; a tie counts half."""
        return self.firsts + 0.5 * self.ties

    @property
    def choices(self) -> Array:
        """[N] the number of choices, ties included."""
        return self.firsts + self.seconds + self.ties

    @property
    def decided(self) -> NDArray[np.bool_]:
        """[N] whether one side was preferred more often than the other."""
        return np.not_equal(self.firsts, self.seconds)

    def take(self, rows: NDArray[np.bool_]) -> Pairs:
        """Return the pairs of some rows."""
        return Pairs(self.differences[rows], self.firsts[rows], self.seconds[rows], self.ties[rows], self.units[rows])


@dataclass(frozen=True)
class HeldOut:
    """Predictions of choices on which the model was not fitted.

    Attributes:
        right: number of decided pairs in which the model prefers the same side as people did.
        count: number of decided pairs.
        worth: number of independent pairs that say as much about the share of right predictions; None for `count`.
    """

    right: int
    count: int
    worth: float | None = None

    @classmethod
    def of_units(cls, units: Counts, right: Array | Counts, counts: Array | Counts) -> HeldOut:
        """Predictions of pairs in U units, such as prompts. The pairs of a unit may depend on each other.

        The worth is the count, divided by the design effect: the variance of the share among units, divided by its
        variance if all pairs were independent (Kish 1965), and at least 1. With few units this variance is itself
        uncertain, so the worth is also multiplied by (z / t)², the squared ratio of the quantiles of the normal
        distribution and of Student's with U - 1 degrees of freedom (Korn and Graubard 1998).

        Args:
            units: [N] whole numbers; rows with the same number are of one of the U units.
            right: [N] number of right predictions in a row.
            counts: [N] number of decided pairs in a row. Units without any do not count.
        """
        _, places = np.unique(units[counts > 0], return_inverse=True)
        right, counts = np.bincount(places, right[counts > 0]), np.bincount(places, counts[counts > 0])
        total, number = float(counts.sum()), len(counts)
        if number < 2:
            return cls(int(right.sum()), int(total), 0.0)
        share = float(right.sum()) / total
        alone = share * (1 - share) * total
        among = number / (number - 1) * float(np.square(right - share * counts).sum())
        effect = max(float(among / alone), 1.0) if alone else 1.0
        few = (norm.ppf(_UPPER) / student.ppf(_UPPER, number - 1)) ** 2
        return cls(int(right.sum()), int(total), float(total / effect * few))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the share of right predictions; see `wilson`."""
        worth = self.count if self.worth is None else self.worth
        return wilson(self.right / max(self.count, 1) * worth, worth)

    @property
    def beats_chance(self) -> bool:
        """Whether the interval lies above one half."""
        return self.interval[0] > 0.5

    def words(self, what: str) -> str:
        """The share of right predictions and its interval, for people; `what` was predicted."""
        low, high = self.interval
        return f"{self.right / self.count:.0%} of {self.count} held-out {what} (95 %: {low:.0%} to {high:.0%})"


def loss(pairs: Pairs, weights: Array) -> float:
    """Return -Σ log-likelihood of the choices, in nats."""
    logits = pairs.differences @ weights
    return float(pairs.choices @ np.logaddexp(0.0, logits) - pairs.wins @ logits)


def fit(pairs: Pairs, penalty: float, start: Array | None = None) -> Array:
    """Return the weights [D] that minimise `loss` + penalty/2 · |w|².

    This is Newton's method. A step is halved as long as it gains less than a quarter of what the slope promises.

    Args:
        pairs: the pairs to fit.
        penalty: above 0.
        start: weights at which the method begins, 0 by default; the result does not depend on them.
    """
    x, choices, wins = pairs.differences, pairs.choices, pairs.wins
    weights = np.zeros(x.shape[1]) if start is None else start

    def total(at: Array) -> float:
        return loss(pairs, at) + 0.5 * penalty * float(at @ at)

    for _ in range(_STEPS):
        chance = expit(x @ weights)
        gradient = x.T @ (choices * chance - wins) + penalty * weights
        curvature = (x.T * (choices * chance * (1 - chance))) @ x + penalty * np.eye(len(weights))
        step = solve(curvature, gradient, assume_a="pos")
        promised = float(gradient @ step)
        # Convergence is quadratic, so a full step from here leaves only rounding errors.
        if promised <= _CLOSE * choices.sum():
            return np.asarray(weights - step)
        size, here = 1.0, total(weights)
        while total(weights - size * step) > here - _ENOUGH * size * promised:
            size /= 2
        weights = weights - size * step
    raise AssertionError("unreachable: Newton's method with halved steps converges on a strictly convex loss")


def shorten(pairs: Pairs) -> tuple[Pairs, Array]:
    """Return the pairs in as few features as their differences span, and the directions [D, R] of those features.

    With a quadratic penalty, the solution lies in this span. It is exactly directions @ (solution in R features).
    """
    if len(pairs) >= pairs.differences.shape[1]:
        return pairs, np.eye(pairs.differences.shape[1])
    directions, _ = np.linalg.qr(pairs.differences.T)
    return replace(pairs, differences=pairs.differences @ directions), directions


def choose_penalty(pairs: Pairs, folds: int = FOLDS) -> float:
    """Return the penalty of `PENALTIES` under which held-out choices are most likely; the first of equal ones."""
    losses = np.zeros(len(PENALTIES))
    for held in held_out_rows(pairs, folds):
        rest, there, weights = pairs.take(~held), pairs.take(held), None
        for place, penalty in enumerate(PENALTIES):
            weights = fit(rest, penalty, weights)
            losses[place] += loss(there, weights)
    return PENALTIES[int(losses.argmin())]


def validate(pairs: Pairs, penalty: float | None = None) -> HeldOut:
    """Measure how well the model predicts the choices in units on which it was not fitted.

    Args:
        pairs: pairs of two units or more.
        penalty: None chooses a penalty for every fold, with the fold's training pairs alone, so that it does not depend
            on the held-out pairs.
    """
    # A difference of 0 predicts neither side.
    right = np.sign(predictions(pairs, penalty)) == np.sign(pairs.firsts - pairs.seconds)
    return HeldOut.of_units(pairs.units, (right & pairs.decided).astype(int), pairs.decided.astype(int))


def predictions(pairs: Pairs, penalty: float | None = None) -> Array:
    """Return the logits [N] of pairs, each by a model that was fitted on other units. Arguments as for `validate`."""
    found = np.zeros(len(pairs))
    for held in held_out_rows(pairs, FOLDS):
        rest = pairs.take(~held)
        weights = fit(rest, choose_penalty(rest, INNER_FOLDS) if penalty is None else penalty)
        found[held] = pairs.differences[held] @ weights
    return found


def held_out_rows(pairs: Pairs, folds: int) -> list[NDArray[np.bool_]]:
    """Return for each fold which rows are held out.

    Units are assigned to the folds in turn, by their numbers. If there are few units, each has its own fold.
    """
    numbers, places = np.unique(pairs.units, return_inverse=True)
    count = min(folds, len(numbers))
    return [np.asarray(places % count == fold) for fold in range(count)]
