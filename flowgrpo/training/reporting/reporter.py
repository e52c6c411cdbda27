"""The protocol of reporters, which show the progress of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .symptoms import Symptom

if TYPE_CHECKING:
    from ..trainer import Trainer


@dataclass(frozen=True)
class Alarm:
    """A warning about the results of an evaluation.

    Attributes:
        text: a sentence for a person.
        metric: the name of a metric of the evaluation that is set to 1, such as "guard/NAME".
        ends: whether the alarm ends the run before its last iteration.
    """

    text: str
    metric: str
    ends: bool = False

    def __str__(self) -> str:
        return self.text


class Reporter(Protocol):
    """Shows the progress of a run."""

    def started(self, trainer: Trainer) -> None:
        """Called once, before the first iteration."""

    def iteration(self, record: Mapping[str, Any]) -> None:
        """Called after each iteration with its metrics."""

    def evaluation(self, iteration: int, record: Mapping[str, float | None]) -> None:
        """Called after each evaluation."""

    def symptom(self, symptom: Symptom) -> None:
        """Called when a symptom has lasted for some time."""

    def alarm(self, alarm: Alarm) -> None:
        """Called when an extension gives an alarm after an evaluation."""

    def note(self, text: str) -> None:
        """Called with a sentence that a person should read before the run goes on."""
