"""Exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from diffusers.training_utils import EMAModel
from torch import nn

from .borrowing import exchanging
from .sharding import cut_as, whole

__all__ = ["Ema"]


class _Named(Protocol):
    def named_parameters(self) -> dict[str, nn.Parameter]: ...

    def write(self) -> None: ...


class Ema:
    """Exponential moving average of the trained parameters; Flow-GRPO evaluates and saves such an average.

    The average is updated once in `every` optimizer steps: `average ← d·average + (1 − d)·weights`. Here
    `d = min((1+s)/(10+s), decay)`, or with `rise` `d = min(rise·s, decay)` (DiffusionNFT's sampling policy), and
    s = 0, 1, ... counts optimizer steps. A decay of 0 copies the weights: this gives an anchor that moves once in
    `every` steps (SAGE-GRPO). The average has the dtype and device that the parameters have when the average is made.

    Args:
        weights: an object with the trained parameters by name (`TrainedWeights`).
        decay: largest d, in [0, 1).
        every: number of optimizer steps between two updates, at least 1.
        rise: growth of d per optimizer step, above 0.

    Raises:
        ValueError: `decay`, `rise` or `every` out of range.
    """

    def __init__(self, weights: _Named, *, decay: float = 0.9, every: int = 8, rise: float | None = None) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA decay is {decay}; use a number in [0, 1), 0.9 is usual")
        if every < 1:
            raise ValueError(f"EMA is updated every {every} optimizer steps; use 1 or more")
        if rise is not None and not rise > 0:
            raise ValueError(f"EMA rise is {rise}; use a number above 0, or None")
        self.decay = decay
        self.rise = rise
        self.every = every
        self.steps = 0
        self._weights = weights
        self._average = EMAModel(self._parameters(), decay=decay)
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
        if self.steps % self.every:
            return False
        # EMAModel counts its own updates, but the warm-up here counts optimizer steps.
        self._average.optimization_step = self.steps - 1
        if self.rise is not None:
            self._average.min_decay = self._average.decay = min(self.rise * (self.steps - 1), self.decay)
        self._average.step(self._parameters())
        return True

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
        self._average.store(self._parameters())
        self._average.copy_to(self._parameters())
        self._weights.write()
        self._applied = True

    def _put_back(self) -> None:
        self._average.restore(self._parameters())
        self._weights.write()
        self._applied = False

    def state_dict(self) -> dict[str, Any]:
        """`steps` (optimizer steps counted) and `average` (name -> tensor on the CPU).

        If the weights are sharded, all processes must call this method, and only the first process gets the tensors.
        """
        names = self._weights.named_parameters()
        shadows = self._average.shadow_params
        return {
            "steps": self.steps,
            "average": {name: whole(s) for name, s in zip(names, shadows, strict=True)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, and continue as without an interruption; `decay` and `every` of this object are kept.

        Raises:
            ValueError: names or shapes differ from the trained parameters.
        """
        names = list(self._weights.named_parameters())
        average = state["average"]
        shadows = dict(zip(names, self._average.shadow_params, strict=True))
        odd = sorted(set(average) ^ set(names))
        odd += [name for name in names if name in average and average[name].shape != shadows[name].shape]
        if odd:
            raise ValueError(
                f"the parameters of this average differ from the trained parameters: {', '.join(odd[:5])} "
                f"({len(odd)} in all are missing, unexpected or of another shape)"
            )
        self.steps = int(state["steps"])
        for name, shadow in shadows.items():
            shadow.copy_(cut_as(shadow, average[name]))
