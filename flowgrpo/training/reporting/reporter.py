"""What a run tells whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .symptoms import Symptom

if TYPE_CHECKING:
    from ..trainer import Trainer


@dataclass(frozen=True)
class Alarm:
    """What an evaluation shows and should not.

    Attributes:
        text: a sentence for a person.
        metric: what is 1 in the metrics of the evaluation, such as "guard/NAME".
        ends: whether the run ends before its last iteration.
    """

    text: str
    metric: str
    ends: bool = False

    def __str__(self) -> str:
        return self.text


class Reporter(Protocol):
    """Whatever shows the progress of a run."""

    def started(self, trainer: Trainer) -> None:
        """Called once, before the first iteration."""

    def iteration(self, record: Mapping[str, Any]) -> None:
        """Called after each iteration with what goes into the metrics."""

    def evaluation(self, iteration: int, record: Mapping[str, float | None]) -> None:
        """Called after each evaluation."""

    def symptom(self, symptom: Symptom) -> None:
        """Called with what a run should not show, when it has lasted for some time."""

    def alarm(self, alarm: Alarm) -> None:
        """Called when an evaluation shows what it should not."""

    def note(self, text: str) -> None:
        """Called with a sentence that a person should read before the run goes on."""
