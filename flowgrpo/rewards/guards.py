"""Guards: rewards that are measured and never optimised, and that warn or stop a run when they fall.

Over-optimisation shows as a reward that rises while others, which nobody optimises, fall (Gao et al., "Scaling Laws for
Reward Model Overoptimization", arXiv 2210.10760). A guard is told the mean of such a reward at each measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ACTIONS = ("warn", "stop")
REFERENCES = ("start", "best")


@dataclass(frozen=True)
class Guard:
    """What is watched, and when it has fallen.

    Attributes:
        reward: name of a reward in metrics.
        fall: it has fallen when its mean is more than this below the reference, in the reward's own unit.
        reference: "start", the mean of the first measurements, or "best", the highest smoothed mean so far.
        settle: how many first measurements make the start.
        smooth: how many of the latest measurements are averaged before they are compared.
        patience: how many measurements in a row have to be that low.
        action: "warn" or "stop".
    """

    reward: str
    fall: float
    reference: str = "start"
    settle: int = 1
    smooth: int = 1
    patience: int = 1
    action: str = "warn"

    def __post_init__(self) -> None:
        if not self.reward:
            raise ValueError("a guard needs the name of a `reward`")
        what = f"the guard of {self.reward!r}"
        if isinstance(self.fall, bool) or not isinstance(self.fall, (int, float)) or not 0 <= self.fall < math.inf:
            raise ValueError(f"{what}: fall is {self.fall!r}; give a number of 0 or more, in the reward's unit")
        for name, allowed in (("reference", REFERENCES), ("action", ACTIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{what}: {name} is {getattr(self, name)!r}; give one of {', '.join(allowed)}")
        for name in ("settle", "smooth", "patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{what}: {name} is {value!r}; give a whole number of 1 or more")


@dataclass(frozen=True)
class Alarm:
    """A reward has fallen.

    Attributes:
        guard: whose.
        value: the smoothed mean now.
        reference: what it fell from.
        iteration: when it was measured.
    """

    guard: Guard
    value: float
    reference: float
    iteration: int

    def __str__(self) -> str:
        since = "its best" if self.guard.reference == "best" else "the start"
        return (
            f"{self.guard.reward} fell to {self.value:.4g} at iteration {self.iteration}, from {self.reference:.4g} at "
            f"{since}; that is more than {self.guard.fall:g}"
        )


class Guards:
    """Watches rewards over a run.

    Its state belongs in checkpoints, so that a resumed run is watched as if it had gone on.

    Args:
        guards: one for each reward at most.
        measured: names of the rewards that are measured.
        weights: their weights in the combined reward; a guard's is 0.

    Raises:
        ValueError: a guard watches what is not measured, or what is optimised, or two watch the same.
    """

    def __init__(self, guards: Sequence[Guard], measured: Sequence[str], weights: Mapping[str, float] | None = None):
        names = [guard.reward for guard in guards]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two guards watch {name!r}; leave one of them out")
            if name not in measured:
                raise ValueError(f"a guard watches {name!r}, which is not measured; measured: {', '.join(measured)}")
            if (weights or {}).get(name, 0.0):
                raise ValueError(f"a guard watches {name!r}, which is optimised; set its weight to 0")
        self.guards = tuple(guards)
        # By reward: the first measurements, the latest, the best smoothed mean, and how many in a row were low.
        self._first: dict[str, list[float]] = {name: [] for name in names}
        self._latest: dict[str, list[float]] = {name: [] for name in names}
        self._best: dict[str, float] = {}
        self._low: dict[str, int] = dict.fromkeys(names, 0)

    def observe(self, iteration: int, means: Mapping[str, float | None]) -> list[Alarm]:
        """Take the means of a measurement, and say what has fallen.

        A reward without a mean, because it applied to no sample, is left out: it has not fallen. An alarm is given
        once, when the patience runs out, and again only after the reward has recovered.

        Args:
            iteration: when it was measured.
            means: reward -> mean, the same on every process.
        """
        alarms = []
        for guard in self.guards:
            value = means.get(guard.reward)
            if value is None or not math.isfinite(value):
                continue
            alarm = self._watch(guard, float(value), iteration)
            if alarm is not None:
                alarms.append(alarm)
        return alarms

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered, ready for JSON."""
        return {"first": self._first, "latest": self._latest, "best": self._best, "low": self._low}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; guards that are new since then begin anew."""
        for name in self._first:
            if name in state["first"]:
                self._first[name] = [float(value) for value in state["first"][name]]
                self._latest[name] = [float(value) for value in state["latest"][name]]
                self._low[name] = int(state["low"][name])
                if name in state["best"]:
                    self._best[name] = float(state["best"][name])

    def _watch(self, guard: Guard, value: float, iteration: int) -> Alarm | None:
        name = guard.reward
        first, latest = self._first[name], self._latest[name]
        latest.append(value)
        del latest[: -guard.smooth]
        smoothed = math.fsum(latest) / len(latest)
        if len(first) < guard.settle:
            first.append(value)
            self._best[name] = max(self._best.get(name, -math.inf), smoothed)
            return None
        reference = math.fsum(first) / len(first) if guard.reference == "start" else self._best[name]
        self._best[name] = max(self._best[name], smoothed)
        self._low[name] = self._low[name] + 1 if smoothed < reference - guard.fall else 0
        return Alarm(guard, smoothed, reference, iteration) if self._low[name] == guard.patience else None
