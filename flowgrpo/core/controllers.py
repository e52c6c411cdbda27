"""Coefficients that follow a measurement, such as the weight of an entropy bonus or the price of a constraint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class SetPoint:
    """A number that is moved after every step, so that a measurement reaches a target.

    value <- clamp(value + sign rate (measured - target), low, high), or, with `geometric`,
    value <- clamp(value exp(sign rate (measured - target)), low, high).

    Attributes:
        value: the current coefficient.
        target: what the measurement should be.
    """

    def __init__(
        self,
        value: float,
        target: float,
        rate: float,
        *,
        sign: int = 1,
        low: float = 0.0,
        high: float = math.inf,
        geometric: bool = False,
    ) -> None:
        """Start at a value.

        Args:
            value: first value.
            target: target of the measurement.
            rate: how far the value moves for an error of 1, above 0.
            sign: 1 if a higher value brings the measurement down, as a penalty does; -1 if it brings it up.
            low: least value.
            high: greatest value.
            geometric: multiply instead of adding; `low` must then be above 0.

        Raises:
            ValueError: if a number is out of range.
        """
        if not (low <= value <= high and rate > 0 and math.isfinite(target) and sign in (1, -1)):
            raise ValueError(
                f"value={value}, low={low}, high={high}, rate={rate}, target={target}, sign={sign}; use "
                "low <= value <= high, a rate above 0, a finite target, and 1 or -1 for the sign"
            )
        if geometric and not low > 0:
            raise ValueError(f"`low` is {low}; a geometric controller cannot leave 0, so use a least value above 0")
        self.value, self.target = float(value), float(target)
        self._rate, self._low, self._high, self._geometric = sign * rate, low, high, geometric

    def update(self, measured: float) -> float:
        """Move the value and return it. A measurement that is not finite (a step without tokens) changes nothing."""
        move = self._rate * (measured - self.target)
        if math.isfinite(move):
            # exp overflows a float beyond 709; the bounds apply long before.
            moved = self.value * math.exp(min(move, 700.0)) if self._geometric else self.value + move
            self.value = min(max(moved, self._low), self._high)
        return self.value

    def state_dict(self) -> dict[str, float]:
        """Everything that `load_state_dict` needs. The target and the limits come from the recipe."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.value = float(state["value"])


def entropy_bonus(target: float, *, value: float = 0.0, rate: float = 0.01, high: float = 0.1) -> SetPoint:
    """A coefficient that grows while entropy is below its target: the weight of an entropy bonus, or the upper clip.

    This is the set-point of Arbitrary Entropy Policy Optimization (arXiv 2510.08141). It acts on a bonus; the paper's
    acts on temperature-adjusted samples.

    Args:
        target: nats per token.
        value: first value.
        rate: change per nat of error.
        high: greatest coefficient.
    """
    return SetPoint(value, target, rate, sign=-1, high=high)


def variance_dual(target: float, *, value: float = 1.0, rate: float = 1.0, high: float = math.inf) -> SetPoint:
    """Dual ascent on the price `lam` of `offpolicy.r2vpo`: it grows while the ratio's variance is above its target.

    Args:
        target: variance of the ratio, such as 0.01.
        value: first value.
        rate: change per unit of excess variance.
        high: greatest price.
    """
    return SetPoint(value, target, rate, high=high)
