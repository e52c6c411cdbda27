"""Live progress of a run, a line per iteration: the same on a terminal and in a log file."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from ..rewards.guards import Alarm
    from .symptoms import Symptom
    from .trainer import Trainer

_HEADER = " iteration   reward  trend   held-out    ratio  clipped      kl {:>9}  s/iter     left"
_TREND = 20


class ConsoleReporter:
    """Prints what a person wants to know while a run goes on.

    Args:
        console: where to print.
        main: whether this process prints at all.
    """

    def __init__(self, console: Console, main: bool = True) -> None:
        self.console, self.main = console, main
        self._rewards: deque[float] = deque(maxlen=2 * _TREND)
        self._heldout = ""
        self._lines = 0
        self._first = 0
        self._total = 0
        self._samples, self._noun = 0, "images"
        self._every = 1
        self._last = 0.0
        self._spent = {"iteration": (0.0, 0), "evaluation": (0.0, 0)}

    def say(self, text: str) -> None:
        """Print one line, uncoloured and unwrapped."""
        if self.main:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def started(self, trainer: Trainer) -> None:
        """Say what will be done."""
        recipe, task = trainer.recipe, trainer.task
        self._first, self._total = trainer.next_iteration, recipe.run.iterations
        self._samples, self._noun = task.samples_per_iteration(), task.noun
        self._every, self._last = recipe.evaluate.every, time.perf_counter()
        for line in task.describe():
            self.say(line)
        if trainer.next_iteration:
            self.say(f"resumed before iteration {trainer.next_iteration}")

    def iteration(self, record: Mapping[str, Any]) -> None:
        """One line of the table."""
        reward = record.get("reward/total")
        if reward is not None:
            self._rewards.append(reward)
        if self._lines % 25 == 0:
            self.say(_HEADER.format(f"{self._noun[:7]}/s"))
        self._lines += 1
        self._lap("iteration")
        done = record["iteration"] + 1
        seconds = sum(value for key, value in record.items() if key.startswith("time/"))
        ratio = record.get("ratio/mean")
        self.say(
            f"{done:>5}/{self._total:<5} {_cell(reward, 7, 4)} {self._trend():>6} {self._heldout:>9} "
            f"{_cell(ratio, 9, 6)} {_cell(_percent(record.get('clip_share')), 7, 1)}% {_cell(record.get('kl'), 7, 4)} "
            f"{self._samples / max(seconds, 1e-9):>9.1f} {seconds:>7.2f} {_clock(self._left(done)):>8}"
        )
        if record["iteration"] == self._first:
            error = record["ratio/first_error"]
            verdict = "exactly 1" if error == 0 else f"off by up to {error:.1e}"
            self.say(f"ratio before the first update: {verdict}")

    def alarm(self, alarm: Alarm) -> None:
        """A line for a reward that has fallen, and what follows from it."""
        end = "the run ends here, its weights are saved" if alarm.guard.action == "stop" else "the run goes on"
        self.say(f"guard: {alarm}; {end}")

    def symptom(self, symptom: Symptom) -> None:
        """A line for what the run should not show."""
        self.say(f"warning: {symptom}")

    def evaluation(self, iteration: int, record: Mapping[str, float | None]) -> None:
        """A line for an evaluation."""
        self._lap("evaluation")
        self._heldout = " ".join(f"{value:.4f}" for value in record.values() if value is not None)
        listed = ", ".join(f"{name.removeprefix('eval/')} {_cell(value, 0, 4)}" for name, value in record.items())
        self.say(f"held-out after {iteration} iterations: {listed}")

    def _lap(self, part: str) -> None:
        now = time.perf_counter()
        seconds, count = self._spent[part]
        self._spent[part] = seconds + now - self._last, count + 1
        self._last = now

    def _left(self, done: int) -> float:
        """Seconds to the end: iterations and evaluations still to come, each at its mean so far."""
        evaluations = (self._total - 1) // self._every - (done - 1) // self._every + 1
        still = {"iteration": self._total - done, "evaluation": evaluations}
        return sum(seconds / max(count, 1) * still[part] for part, (seconds, count) in self._spent.items())

    def _trend(self) -> str:
        values = list(self._rewards)
        if len(values) < 10:
            return "·"
        half = len(values) // 2
        change = sum(values[half:]) / (len(values) - half) - sum(values[:half]) / half
        return f"{'↑' if change > 0 else '↓'}{abs(change):.3f}"


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{value:>{width}.{digits}f}" if value is not None else f"{'–':>{width}}"


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
