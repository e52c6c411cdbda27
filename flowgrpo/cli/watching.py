"""`flowgrpo watch`: the figures and the gallery of a run that another terminal trains."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..configs.run_recipes import measured_alike_since
from .output import console
from .trusting import LinksOption, trust_run

if TYPE_CHECKING:
    from ..training.reporting.progress import ConsoleReporter

Record = dict[str, float]


def watch(
    run: Annotated[Path, typer.Argument(help="Run folder, of a run that goes on or has ended.")],
    last: Annotated[int, typer.Option(min=0, help="How many of the past iterations are printed.")] = 10,
    every: Annotated[float, typer.Option(help="Seconds between readings, 0.2 to 86400.")] = 2.0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the gallery in a browser.")] = False,
    trust: LinksOption = False,
) -> None:
    """Follow a run: print its figures, and keep its gallery up to date, until the run ends or Ctrl-C."""
    from ..gallery.watch import Follower
    from ..intake.links import check_links
    from ..training.reporting.progress import ConsoleReporter

    # typer's `min` accepts "nan" in some versions.
    if not 0.2 <= every <= 86400:
        raise ValueError(f"--every is {every}; give seconds from 0.2 to 86400")
    trust_run(trust, [run])
    check_links(run)
    gallery = Follower([run])
    with ConsoleReporter(console) as reporter:
        try:
            follow(Figures(run, reporter, last), gallery, lambda: time.sleep(every), open_page)
        except KeyboardInterrupt:
            reporter.say("no longer watching; the run goes on")
        reporter.doing("completing the gallery")
        gallery.close()


def follow(figures: Figures, gallery: Any, wait: Callable[[], object], open_page: bool) -> None:
    """Print figures and build the gallery after each `wait`, until the process of the run is gone."""
    told = False
    while True:
        # Asked before reading, so that nothing is missed that the run wrote before its end.
        gone = figures.gone()
        figures.read()
        gallery.look()
        if gallery.page is not None and not told:
            told = True
            address = gallery.page.resolve().as_uri()
            figures.reporter.say(f"gallery: {address}")
            if open_page:
                import webbrowser

                webbrowser.open(address)
        if gone or figures.complete():
            figures.reporter.say(figures.ending())
            return
        wait()


class Figures:
    """Prints the records of a run's metrics as the run itself does.

    Args:
        run: run folder.
        reporter: prints.
        last: how many of the past iterations are printed.

    Raises:
        ValueError: the recipe of the run cannot be read.
    """

    def __init__(self, run: Path, reporter: ConsoleReporter, last: int) -> None:
        from ..configs.yaml_text import read_yaml_mapping

        self.run, self.reporter, self.last = run, reporter, last
        config = read_yaml_mapping(run / "config.yaml", "the recipe of the run, or train again")
        self.total = _whole(_section(config, "run").get("iterations"))
        self.few = _whole(_section(_section(config, "evaluate"), "quick").get("prompts"))
        self._printed: int | None = None

    def read(self) -> None:
        """Print what is new in the metrics."""
        from ..gallery.run_reading import is_iteration, read_metrics

        records = [_printable(record) for record in read_metrics(self.run / "metrics.jsonl")[0]]
        newest = int(records[-1]["iteration"]) if records else -1
        if self._printed is None:
            done = sum(map(is_iteration, records))
            self.reporter.say(f"{self.run}: {done} of {self.total} iterations are done")
            self.reporter.doing("waiting for the first iteration")
            self._printed = -1
            records = self._begin(records)
        elif newest < self._printed:
            self.reporter.say(f"the run went back to iteration {newest + 1}")
            self._printed = newest
        elif self._printed < 0:
            records = self._begin(records)
        for record in records:
            if record["iteration"] > self._printed:
                self._print(record)
        self._printed = newest

    def _begin(self, records: list[Record]) -> list[Record]:
        """Take what the reporter has to know from the first records; returns the records to print."""
        evaluated = {name for record in records for name in record if name.startswith("eval/")}
        shown = max(len(records) - self.last, 0)
        if records:
            since = measured_alike_since(self.run)
            self.reporter.follow(self.total, self.few, records[:shown], tuple(sorted(evaluated)), since)
        return records[shown:]

    def _print(self, record: Record) -> None:
        iteration = int(record["iteration"])
        if any(name.startswith(("eval/", "quick/")) for name in record):
            self.reporter.evaluation(iteration, record)
        for name, lasted in record.items():
            if name.startswith("symptom/"):
                self.reporter.say(f"warning: {name.removeprefix('symptom/')} for {lasted:.0f} iterations", "yellow")
        from ..gallery.run_reading import is_iteration

        if is_iteration(record):
            self.reporter.iteration({**record, "iteration": iteration})

    def gone(self) -> bool:
        """Whether the process that trained is gone, as far as this machine can tell."""
        from ..training.folder.lock import held

        holder = self._holder()
        if holder is None:
            return False
        try:
            os.kill(holder, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # a process of another user
        # A notebook lives on after its run, and has released the lock.
        return self._evaluated_last() and self._result() is not None and not held(self.run)

    def complete(self) -> bool:
        """Whether the final evaluation is there, and the process is not on this machine, so nothing else can tell."""
        return self._holder() is None and self._evaluated_last()

    def _evaluated_last(self) -> bool:
        return self._printed is not None and 0 < self.total <= self._printed

    def _holder(self) -> int | None:
        """The process that writes in the folder, or wrote there last; None if it is on another machine or not known."""
        from ..intake.json_text import parse_json
        from ..training.folder.lock import NAME

        try:
            with (self.run / NAME).open("rb") as file:
                found = parse_json(file.read(4096))
            process, host = int(found["process"]), found["host"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return process if host == socket.gethostname() and process > 0 else None

    def _result(self) -> Path | None:
        """The folder of the trained weights, which a run writes at its end."""
        from ..training.folder.leftovers import RESULTS

        return next((self.run / name for name in RESULTS if (self.run / name).is_dir()), None)

    def _is_newest(self, result: Path) -> bool:
        """Whether a result is of the run as it is: a run that is made longer has the result of the shorter run."""
        metrics = self.run / "metrics.jsonl"
        return self._evaluated_last() or not metrics.is_file() or result.stat().st_mtime >= metrics.stat().st_mtime

    def ending(self) -> str:
        """How the run ended, and how to go on if it was interrupted."""
        if (result := self._result()) is not None and self._is_newest(result):
            return f"the run has ended; trained weights: {result}"
        if self._evaluated_last():
            return "the run has made its final evaluation"
        return f"the run was interrupted; go on with `flowgrpo resume {self.run}`"


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _printable(record: Record) -> Record:
    """A record without names that a terminal would take as commands."""
    return {name: value for name, value in record.items() if name.isprintable()}
