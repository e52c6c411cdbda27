"""A reporter that counts the states and the seconds of a run, for its compute."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...training.reporting.reporter import Alarm
from ...training.reporting.symptoms import Symptom
from ...training.trainer import Trainer
from ..measures import flow_task

Report = Callable[[str], None]


def clock_for(device: torch.device) -> Callable[[], float]:
    """The clock of a measurement: on a CPU seconds of this process, so that the machine's other work does not count."""
    return time.process_time if device.type == "cpu" else time.perf_counter


class Meter:
    """A reporter that counts states through the denoiser and seconds, and writes one line for each iteration.

    Seconds follow `clock_for`. Evaluations count neither as states nor as seconds.

    Args:
        file: where to append the counts; if an iteration has several lines, the last one counts.
        name: name of the run, for its reports.
        report: called with a line at each evaluation.
    """

    def __init__(self, file: Path, name: str, report: Report) -> None:
        self.file, self.name, self.report = file, name, report
        self.states = [0, 0]

    def started(self, trainer: Trainer) -> None:
        """Watch the denoisers of a trainer."""
        self.trainer, self.clock = trainer, clock_for(trainer.task.device)
        self.began = self.clock()
        if trainer.next_iteration:
            self.report(f"{self.name}: goes on before iteration {trainer.next_iteration}")
        for module in trainer.task.weights.modules.values():
            module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (kwargs.get("hidden_states"), *args, *kwargs.values()) if torch.is_tensor(value)]
        self.states[torch.is_grad_enabled()] += len(tensors[0])

    def _begin(self) -> None:
        self.states, self.began = [0, 0], self.clock()

    def iteration(self, record: Mapping[str, Any]) -> None:
        """Write the counts of the iteration."""
        number, recipe = record["iteration"], flow_task(self.trainer).recipe
        edges = flow_task(self.trainer).plan_for(number).counts().trained_edges * recipe.rollout.prompts
        line = {
            "iteration": number,
            "forward": self.states[0],
            "trained_states": self.states[1],
            "trained_edges": edges,
            "seconds": self.clock() - self.began,
        }
        self._begin()
        # A full disk may have cut the last line short, and a line that is joined to it would be lost.
        torn = self.file.is_file() and not self.file.read_bytes().endswith(b"\n")
        with self.file.open("a", encoding="utf-8") as handle:
            handle.write("\n" * torn + json.dumps(line) + "\n")

    def evaluation(self, iteration: int, record: Mapping[str, float | None]) -> None:
        """Discard the counts of the evaluation, and report its scores."""
        self._begin()
        found = ", ".join(f"{key.removeprefix('eval/')} {value}" for key, value in rounded(record).items())
        self.report(f"{self.name}: after {iteration} iterations {found}")

    def alarm(self, alarm: Alarm) -> None:
        """Report the alarm."""
        self.report(f"{self.name}: {alarm}")

    def note(self, text: str) -> None:
        """Report the note."""
        self.report(f"{self.name}: {text}")

    def symptom(self, symptom: Symptom) -> None:
        """Report the symptom."""
        self.report(f"{self.name}: {symptom}")


def rounded(record: Mapping[str, float | None]) -> dict[str, str]:
    """Numbers as a line of progress shows them."""
    return {key: "–" if value is None else f"{value:.4f}" for key, value in record.items()}
