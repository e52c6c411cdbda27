"""The preference model of Bradley and Terry on features of two things, fitted with a quadratic penalty.

With features x_a and x_b, a is preferred to b with probability σ(w·(x_a - x_b)) (Bradley and Terry, "Rank Analysis of
Incomplete Block Designs", 1952). There is no constant, so neither side is favoured. A tie is half a choice for each
side. The loss is convex and with the penalty strictly so: it has one solution, whatever the order of the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve
from scipy.special import expit

from ...votes.interval import wilson

Array = NDArray[np.float64]
PENALTIES = (100.0, 31.6, 10.0, 3.16, 1.0, 0.316, 0.1)
"""What is tried where no penalty is given. The largest comes first: it is kept where others do no better."""
FOLDS, INNER_FOLDS = 10, 5
_STEPS = 100
_CLOSE = 1e-13
_ENOUGH = 0.25


@dataclass(frozen=True)
class Pairs:
    """N different pairs.

    Attributes:
        differences: [N, D] features of the first side minus those of the second.
        firsts: [N] how often the first side was preferred.
        seconds: [N] how often the second side was.
        ties: [N] how often neither was.
        units: [N] whole numbers; pairs of one unit are held out together.
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
        """[N] how often the first side was preferred, a tie counting half."""
        return self.firsts + 0.5 * self.ties

    @property
    def choices(self) -> Array:
        """[N] how often there was a choice or a tie."""
        return self.firsts + self.seconds + self.ties

    @property
    def decided(self) -> NDArray[np.bool_]:
        """[N] whether one side was preferred more often than the other."""
        return np.not_equal(self.firsts, self.seconds)

    def take(self, rows: NDArray[np.bool_]) -> Pairs:
        """Those of some rows."""
        return Pairs(self.differences[rows], self.firsts[rows], self.seconds[rows], self.ties[rows], self.units[rows])


@dataclass(frozen=True)
class HeldOut:
    """Predictions of choices that the model was not fitted on.

    Attributes:
        right: decided pairs of which the model prefers the side that people did.
        count: decided pairs.
    """

    right: int
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the share that is right; see `wilson`."""
        return wilson(self.right, self.count)

    @property
    def beats_chance(self) -> bool:
        """Whether the interval lies above one half."""
        return self.interval[0] > 0.5


def loss(pairs: Pairs, weights: Array) -> float:
    """-Σ log-likelihood of the choices, in nats."""
    logits = pairs.differences @ weights
    return float(pairs.choices @ np.logaddexp(0.0, logits) - pairs.wins @ logits)


def fit(pairs: Pairs, penalty: float, start: Array | None = None) -> Array:
    """The weights [D] that minimise `loss` + penalty/2 · |w|².

    Newton's method, with steps that are halved while they gain less than a quarter of what the slope promises.

    Args:
        pairs: what to fit.
        penalty: above 0.
        start: weights to begin at, 0 by default; the result does not depend on it.
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
        # Convergence is quadratic: a full step from here leaves no more than rounding.
        if promised <= _CLOSE * choices.sum():
            return np.asarray(weights - step)
        size, here = 1.0, total(weights)
        while total(weights - size * step) > here - _ENOUGH * size * promised:
            size /= 2
        weights = weights - size * step
    raise AssertionError("unreachable: Newton's method with halved steps converges on a strictly convex loss")


def shorten(pairs: Pairs) -> tuple[Pairs, Array]:
    """The pairs in as few features as their differences span, and the directions [D, R] of those features.

    With a quadratic penalty the solution lies in that span: it is exactly directions @ (solution in R features).
    """
    if len(pairs) >= pairs.differences.shape[1]:
        return pairs, np.eye(pairs.differences.shape[1])
    directions, _ = np.linalg.qr(pairs.differences.T)
    return replace(pairs, differences=pairs.differences @ directions), directions


def choose_penalty(pairs: Pairs, folds: int = FOLDS) -> float:
    """The one of `PENALTIES` under which choices that are held out are most likely; of equal ones the first."""
    losses = np.zeros(len(PENALTIES))
    for held in _held_out(pairs, folds):
        rest, there, weights = pairs.take(~held), pairs.take(held), None
        for place, penalty in enumerate(PENALTIES):
            weights = fit(rest, penalty, weights)
            losses[place] += loss(there, weights)
    return PENALTIES[int(losses.argmin())]


def validate(pairs: Pairs, penalty: float | None = None) -> HeldOut:
    """How well the model predicts the choices on units that it was not fitted on.

    Args:
        pairs: of two units or more.
        penalty: None chooses one for every fold among what is fitted on, so that nothing held out is seen.
    """
    right = 0
    for held in _held_out(pairs, FOLDS):
        rest, there = pairs.take(~held), pairs.take(held & pairs.decided)
        weights = fit(rest, choose_penalty(rest, INNER_FOLDS) if penalty is None else penalty)
        # A difference of 0 predicts neither side.
        right += int(np.count_nonzero(np.sign(there.differences @ weights) == np.sign(there.firsts - there.seconds)))
    return HeldOut(right, int(np.count_nonzero(pairs.decided)))


def _held_out(pairs: Pairs, folds: int) -> list[NDArray[np.bool_]]:
    """For each fold which rows are held out: units in turn by their numbers, and each alone if there are few."""
    numbers, places = np.unique(pairs.units, return_inverse=True)
    count = min(folds, len(numbers))
    return [np.asarray(places % count == fold) for fold in range(count)]
