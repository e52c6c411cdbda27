"""Live progress of a run: one line per iteration, the same on a terminal, in a pipe and in the run's log."""

from __future__ import annotations

import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ..folder.run_log import RunLog
from ..recipe_prompts import given_columns
from .activity import Activity
from .pace import Pace, Recurring
from .progress_table import (
    INDENT,
    Column,
    columns_of,
    curve,
    duration,
    fitting,
    folded,
    gained,
    header,
    means_of,
    named,
    number,
    row,
    share,
    weighted,
)  # fmt: skip

if TYPE_CHECKING:
    from ..trainer import Trainer
    from .reporter import Alarm
    from .symptoms import Symptom

_TREND = 20
_HEADER_EVERY = 25
_CURVE = 24
_PREFIX = "reward/"


class ConsoleReporter:
    """Prints the progress of a run. As a context manager, it removes the moving line at the end.

    Args:
        console: where to print.
        main: whether this process prints at all.
        log: also gets every line.
    """

    def __init__(self, console: Console, main: bool = True, log: RunLog | None = None) -> None:
        self.console, self.main, self.log = console, main, log
        self.activity = Activity(console)
        self.pace = Pace(0, None, None, time.perf_counter())
        self._rewards: deque[float] = deque(maxlen=2 * _TREND)
        self._evaluated: tuple[str, ...] = ()
        self._heldout: float | None = None
        self._lines, self._first, self._total = 0, 0, 0
        self._samples, self._noun, self._given = 0, "images", False
        self._curve: list[float | None] = []
        self._curve_of: str | None = None
        self._noise = 0.0
        self._few, self._since = 0, 0
        # `flowgrpo watch` does not know how many held-out prompts there are.
        self._few_are_all = False
        self._columns: list[Column] = []

    def __enter__(self) -> ConsoleReporter:
        """This reporter."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the moving line."""
        self.activity.end()

    def say(self, text: str, style: str = "") -> None:
        """Print one line. If a terminal is too narrow, the line is wrapped between words."""
        # With FORCE_COLOR, `is_terminal` is true for a pipe too.
        if self.console.file.isatty() and cell_len(text) > self.console.width:
            shown = textwrap.fill(
                text, self.console.width - 1, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
        else:
            shown = text
        self._print(Text(shown, style), text)

    def doing(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show on a terminal what the run is doing, until the next call, and how much of it is done."""
        if not self.main:
            return
        if text != self.activity.text:
            self.activity.begin(text)
        if total:
            self.activity.count(done, total)

    def started(self, trainer: Trainer) -> None:
        """Print what the run will do."""
        recipe, task = trainer.recipe, trainer.task
        self._first, self._total = trainer.next_iteration, recipe.run.iterations
        self._samples, self._noun = task.samples_per_iteration(), task.noun
        self._given = bool(given_columns(recipe))
        self._evaluated = trainer.evaluation.names if trainer.data.heldout else ()
        self.pace = Pace(self._total, *self._recurring(trainer), time.perf_counter())
        count = trainer.processes.count
        processes = f"{count} process{'es' if count > 1 else ''} on {task.device.type}"
        shared = f", {trainer.shared_out}" if trainer.shared_out else ""
        self.say(f"flowgrpo {version('flowgrpo')}, torch {version('torch')}, {processes}{shared}")
        for line in task.describe():
            self.say(line, "yellow" if line.startswith("note:") else "")
        names, weights = trainer.rewards.names, trainer.rewards.weights.tolist()
        self.say(f"reward{'s' if len(names) > 1 else ''} {weighted(names, weights)}")
        reports = {one.name: one.report for of_run in (trainer.rewards, trainer.evaluation) for one in of_run.rewards}
        for name, report in reports.items():
            if report:
                self.say(f"{name}: {report}")
        if trainer.next_iteration:
            self.say(f"resumed before iteration {trainer.next_iteration}")
            self._since = trainer.keeper.alike_since
            self._remember(trainer.run.read_metrics() if self.main else [])
        trainer.clock.watcher, trainer.clock.counter = self.activity.part, self.activity.count
        for rewards in (trainer.rewards, trainer.evaluation):
            rewards.told = lambda name: self.activity.part(f"reward {name}")
        self._expect(trainer.next_iteration)

    def follow(
        self, total: int, few: int, past: Sequence[Mapping[str, Any]], evaluated: tuple[str, ...], since: int = 0
    ) -> None:
        """Print the records of a run of another process from now on.

        Args:
            total: iterations of the run.
            few: prompts of its quick evaluations; 0 if there are none.
            past: records that are not printed.
            evaluated: names of the rewards that the run evaluates.
            since: evaluations before this iteration have measured something else.
        """
        # How many samples an iteration has is not in the records, so there is no rate.
        self._first, self._total, self._few, self._evaluated, self._noun = -1, total, few, evaluated, ""
        self.pace = Pace(total, None, None, time.perf_counter())
        self._since = since
        self._remember(past)

    def _remember(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take trend, held-out score and curve from the metrics of the iterations before a resume."""
        for record in records:
            if (reward := record.get("reward/total")) is not None:
                self._rewards.append(reward)
            self._held(record["iteration"], record)

    def _held(self, iteration: int, record: Mapping[str, Any]) -> dict[str, float | None]:
        """Take the held-out score and the curve from an evaluation; returns the means that the curve follows, if any.

        The curve is of one set of prompts: the few of quick evaluations, if the run makes them. Evaluations that have
        measured something else than today's are not in it.
        """
        if iteration < self._since:
            return {}
        kind = "quick" if self._few else "eval"
        means = means_of(record, kind)
        if means:
            name, self._heldout = next(iter(means.items()))
            if name != self._curve_of:
                self._curve, self._curve_of = [], name
            self._curve.append(self._heldout)
            # A gain is compared prompt by prompt, so its error is the smaller one.
            errors = (record.get(f"{kind}{of}_error/{name}") for of in ("_gain", ""))
            self._noise = next((error for error in errors if error is not None), 0.0)
        return means

    def _recurring(self, trainer: Trainer) -> tuple[Recurring | None, Recurring | None]:
        settings, samples = trainer.recipe.evaluate, max(self._samples, 1)
        if not self._evaluated:
            return None, None
        every = Recurring(settings.every, len(trainer.data.heldout) / samples)
        if settings.quick is None:
            return every, None
        self._few = min(settings.quick.prompts, len(trainer.data.heldout))
        return every, Recurring(settings.quick.every, self._few / samples)

    def iteration(self, record: Mapping[str, Any]) -> None:
        """Print a line of the table. If there are several rewards, their names and values follow."""
        if (reward := record.get("reward/total")) is not None:
            self._rewards.append(reward)
        done, seconds = record["iteration"] + 1, sum(v for key, v in record.items() if key.startswith("time/"))
        self.pace.iterated(time.perf_counter(), seconds)
        if self._lines % _HEADER_EVERY == 0:
            every = columns_of(record, self._total, self._noun, len(self._evaluated) == 1, self._given)
            self._columns = fitting(every, self.console.width)
            self._print(header(self._columns))
        self._lines += 1
        self._table(record, done, seconds)
        if record["iteration"] == self._first and "ratio/mean" in record:
            error = record["ratio/first_error"]
            verdict = "exactly 1" if error == 0 else f"off by up to {error:.1e}"
            self.say(f"ratio before the first update: {verdict}", "" if error == 0 else "yellow")
        self._expect(done)

    def _table(self, record: Mapping[str, Any], done: int, seconds: float) -> None:
        trend = self._trend()
        line = row(
            {
                "iteration": f"{done}/{self._total}",
                "reward": number(record.get("reward/total"), 7, 4),
                "trend": trend,
                "preferred": number(record.get("preferred"), 9, 4),
                "loss": number(record.get("loss"), 8, 4),
                "held-out": number(self._heldout, 8, 4),
                "ratio": number(record.get("ratio/mean"), 8, 6),
                "clip": share(record.get("clip_share")),
                "kl": number(record.get("kl"), 6, 4),
                f"{self._noun[:6]}/s": number(self._samples / max(seconds, 1e-9), 8, 1),
                "s/iter": number(seconds, 6, 2),
                "left": duration(self.pace.left(done)),
            },
            self._columns,
            {"trend": {"↑": "green", "↓": "red"}.get(trend[0], ""), "reward": "bold"},
        )
        rewards = {key.removeprefix(_PREFIX): value for key, value in record.items() if key.startswith(_PREFIX)}
        rewards.pop("total", None)
        if len(rewards) < 2:
            return self._print(line)
        room = self.console.width - 1
        items = named(rewards, room - INDENT)
        together = "  ".join(items)
        if line.cell_len + 2 + cell_len(together) <= room:
            return self._print(line.append(f"  {together}"))
        self._print(line)
        for part in folded(items, room - INDENT):
            self._print(Text(" " * INDENT + part, "dim"))

    def alarm(self, alarm: Alarm) -> None:
        """Print an alarm of an evaluation, and what follows from it."""
        end = "the run ends here, and its weights are saved" if alarm.ends else "the run goes on"
        self.say(f"{alarm}; {end}", "bold red" if alarm.ends else "yellow")

    def note(self, text: str) -> None:
        """Print a note."""
        self.say(f"note: {text}", "yellow")

    def symptom(self, symptom: Symptom) -> None:
        """Print a symptom as a warning."""
        self.say(f"warning: {symptom}", "yellow")

    def evaluation(self, iteration: int, record: Mapping[str, float | None]) -> None:
        """Print the results of an evaluation of all prompts, of some, or of both."""
        self.pace.evaluated(time.perf_counter(), iteration)
        after = f"after {iteration} iteration{'' if iteration == 1 else 's'}"
        whole, few = means_of(record, "eval"), means_of(record, "quick")
        followed = self._held(iteration, record)
        if whole and whole != few:
            listed = ", ".join(f"{name} {number(mean, 10, 4)}" for name, mean in whole.items())
            self.say(f"held-out {after}: {listed}{self._drawn(followed) if followed == whole else ''}", "cyan")
        if few:
            if whole:
                self._few_are_all = whole == few
            prompts = "held-out" if self._few_are_all else f"{self._few} of the held-out prompts"
            listed = ", ".join(f"{name} {number(mean, 10, 4)}{gained(record, name)}" for name, mean in few.items())
            self.say(f"{prompts} {after}: {listed}{self._drawn(followed)}", "cyan")
        self._expect(iteration, evaluated=True)

    def _drawn(self, means: Mapping[str, float | None]) -> str:
        """The curve of the held-out score, from the third evaluation on. With several rewards, it says its own.

        A change of less than two standard errors does not fill its height.
        """
        if len(self._curve) < 3:
            return ""
        name = f"{next(iter(means))} " if len(means) > 1 else ""
        return f"  {name}{curve(self._curve, _CURVE, 2 * self._noise)}"

    def _expect(self, done: int, evaluated: bool = False) -> None:
        """Show the activity that follows after `done` iterations."""
        if not self.main:
            return
        following = None if evaluated else self.pace.evaluation(done)
        if following is not None:
            self.activity.begin("evaluation", median(following.times) if following.times else None)
        elif done < self._total:
            self.activity.begin(f"iteration {done + 1}/{self._total}", self.pace.iteration)
        else:
            self.activity.begin("writing the results")

    def _print(self, line: Text, logged: str | None = None) -> None:
        if self.main:
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)
            if self.log is not None:
                self.log.write(line.plain if logged is None else logged)

    def _trend(self) -> str:
        values = list(self._rewards)
        if len(values) < 10:
            return "·"
        half = len(values) // 2
        change = sum(values[half:]) / (len(values) - half) - sum(values[:half]) / half
        return f"{'↑' if change > 0 else '↓'}{number(abs(change), 5, 3)}"
