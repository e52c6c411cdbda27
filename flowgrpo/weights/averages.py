"""Exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .borrowing import exchanging
from .pieces import cut_as, whole

__all__ = ["Ema"]


class _Named(Protocol):
    def named_parameters(self) -> dict[str, nn.Parameter]: ...

    def write(self) -> None: ...


class Ema:
    """Exponential moving average of the trained parameters; Flow-GRPO evaluates and saves such an average.

    The average is updated once in `every` optimizer steps: `average ← d·average + (1 − d)·weights`. Here
    `d = min((1+s)/(10+s), decay)`, and s = 0, 1, ... counts optimizer steps. With `rise` it is
    `d = min(first + rise·max(s − after, 0), decay)` (the sampling policies of DiffusionNFT and CRD). A decay of 0
    copies the weights: this gives an anchor that moves once in `every` steps (SAGE-GRPO). The average has the dtype and
    device that the parameters have when the average is made.

    Args:
        weights: an object with the trained parameters by name (`TrainedWeights`).
        decay: largest d, in [0, 1).
        every: number of optimizer steps between two updates, at least 1.
        rise: growth of d per optimizer step, above 0.
        first: with `rise`, d before it grows, in [0, 1).
        after: with `rise`, optimizer steps before d grows.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        weights: _Named,
        *,
        decay: float = 0.9,
        every: int = 8,
        rise: float | None = None,
        first: float = 0.0,
        after: int = 0,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA decay is {decay}; use a number in [0, 1), 0.9 is usual")
        if every < 1:
            raise ValueError(f"EMA is updated every {every} optimizer steps; use 1 or more")
        if rise is not None and not rise > 0:
            raise ValueError(f"EMA rise is {rise}; use a number above 0, or None")
        if not 0 <= first < 1 or after < 0:
            raise ValueError(f"EMA first is {first} and after {after}; use a first in [0, 1) and an after of 0 or more")
        self.decay = decay
        self.rise, self.first, self.after = rise, first, after
        self.every = every
        self.steps = 0
        self._began = 0
        self._weights = weights
        self._average = [parameter.detach().clone() for parameter in self._parameters()]
        self._set_aside: list[Tensor] = []
        self._applied = False
        shards = getattr(weights, "shards", None)
        exchange = exchanging if shards is None else shards.steps.exchange
        self._exchanged: Callable[[], AbstractContextManager[None]] = exchange(self._put, self._put_back)

    def _parameters(self) -> list[nn.Parameter]:
        return list(self._weights.named_parameters().values())

    def step(self) -> bool:
        """Count one optimizer step; True if it updated the average.

        Raises:
            ValueError: the method is called within `applied()`, where the parameters hold the average itself.
        """
        if self._applied:
            raise ValueError(
                "Ema.step() was called within Ema.applied(); leave the context before you continue training"
            )
        self.steps += 1
        if (self.steps - self._began) % self.every:
            return False
        step = 1.0 - self._decay_after(self.steps - 1)
        with torch.no_grad():
            for average, parameter in zip(self._average, self._parameters(), strict=True):
                average.sub_(step * (average - parameter))
        return True

    def begin_anew(self) -> None:
        """Copy the weights into the average, and count `every` from here.

        Raises:
            ValueError: the method is called within `applied()`, where the parameters hold the average itself.
        """
        if self._applied:
            raise ValueError("Ema.begin_anew() was called within Ema.applied(); leave the context before")
        self._began = self.steps
        with torch.no_grad():
            for average, parameter in zip(self._average, self._parameters(), strict=True):
                average.copy_(parameter)

    def _decay_after(self, steps: int) -> float:
        """The d of an update, where `steps` optimizer steps came before the optimizer step that it follows."""
        if self.rise is not None:
            return min(self.first + self.rise * max(steps - self.after, 0), self.decay)
        # The first weights are not averaged with the untrained ones.
        return min((1 + steps) / (10 + steps), self.decay) if steps else 0.0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context the parameters hold the average. Afterwards their earlier values are restored, bitwise.

        Raises:
            ValueError: this context is already active.
        """
        if self._applied:
            raise ValueError("Ema.applied() is already active; leave it before entering it again")
        with self._exchanged():
            yield

    def _put(self) -> None:
        # The weights wait on the CPU, because an evaluation needs the memory of the device.
        self._set_aside = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]
        self._copy(self._average)
        self._weights.write()
        self._applied = True

    def _put_back(self) -> None:
        self._copy(self._set_aside)
        self._set_aside = []
        self._weights.write()
        self._applied = False

    def _copy(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            parameter.data.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """`steps` (optimizer steps counted), `began` (those before `begin_anew`) and `average` (name -> CPU tensor).

        If the weights are sharded, all processes must call this method, and only the first process gets the tensors.
        """
        names = self._weights.named_parameters()
        return {
            "steps": self.steps,
            "began": self._began,
            "average": {name: whole(s) for name, s in zip(names, self._average, strict=True)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, and continue as without an interruption; `decay` and `every` of this object are kept.

        Raises:
            ValueError: names or shapes differ from the trained parameters.
        """
        names = list(self._weights.named_parameters())
        average = state["average"]
        shadows = dict(zip(names, self._average, strict=True))
        odd = sorted(set(average) ^ set(names))
        odd += [name for name in names if name in average and average[name].shape != shadows[name].shape]
        if odd:
            raise ValueError(
                f"the parameters of this average differ from the trained parameters: {', '.join(odd[:5])} "
                f"({len(odd)} in all are missing, unexpected or of another shape)"
            )
        # States of older checkpoints have no `began`.
        self.steps, self._began = int(state["steps"]), int(state.get("began", 0))
        for name, shadow in shadows.items():
            shadow.copy_(cut_as(shadow, average[name]))
