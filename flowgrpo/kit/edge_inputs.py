"""Checks at the edge: pictures such as blank and tiny ones, silent and loud sounds, empty, long and odd prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from ..rewards.base import SAMPLING_RATE
from .drawn_sounds import edge_lengths, edge_sounds
from .findings import FAULT, NOTE, WARNING, Report, finite
from .material import Material, replaced
from .trial import Trial, TrialScores
from .versions import beside, edge_pictures, edge_prompts, edge_sizes, edge_texts, resize

ROWS = 4
_NOT_A_NUMBER = (
    "NaN means that the reward does not apply: such a sample gets no advantage, so nothing leads a model away from it. "
    "Return a low number."
)


class EdgeInputs:
    """Failures at the edge, gathered so that equal ones make one finding."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str, str, str], list[str]] = {}

    def look(self, code: str, name: str, scored: TrialScores, severity: str, advice: str) -> None:
        """Record a failure, or a NaN for the first sample, under the name of what was tried."""
        if scored.failed:
            message = " ".join(scored.failure.split())
            self._names.setdefault((code, severity, f": {message:.300}", advice), []).append(name)
        elif math.isnan(scored.values[0].item()):
            self._names.setdefault((code, severity, "", _NOT_A_NUMBER), []).append(name)

    def tell(self, report: Report) -> None:
        """Add the findings."""
        for (code, severity, message, advice), names in self._names.items():
            listed = "; ".join(names)
            seen = f"it fails on {listed}{message}" if message else f"NaN for {listed}, and a number for other samples"
            report.add(code, severity, seen, advice)


def check_edges(trial: Trial, material: Material, values: Tensor, report: Report) -> None:
    """Check whether the reward gives a number to samples that a model can make during training.

    Args:
        trial: the reward.
        material: a few ordinary samples.
        values: their scores.
        report: gets the findings, and the scores as table `edges`.
    """
    row = int((~values.isnan()).nonzero()[0])
    rows = [row, *(k for k in range(len(material)) if k != row and material.groups[k] == material.groups[row])]
    part = material.take(rows[:ROWS])
    found: dict[str, float] = {}
    failures = EdgeInputs()
    if trial.task == "images":
        edges: Iterable[tuple[str, str, Tensor | list[str]]] = [
            (code, name, replaced(part.images, 0, picture)) for code, name, picture in edge_pictures(part.images[0])
        ]
    elif trial.task == "sounds":
        edges = [(code, name, replaced(part.images, 0, sound)) for code, name, sound in edge_sounds(part.images[0])]
    else:
        edges = [(code, name, beside(part.texts, 0, text)) for code, name, text in edge_texts(part.texts[0])]
    for code, name, samples in edges:
        scored = trial.score(part.changed(samples))
        found[name] = scored.values[0].item()
        failures.look(code, name, scored, FAULT, "A model can make such a sample: let it have a low score.")
    if trial.task == "images":
        _look_at_sizes(trial, part, failures)
    elif trial.task == "sounds":
        _look_at_lengths(trial, part, failures)
    _look_at_prompts(trial, part, failures, report)
    failures.tell(report)
    report.tables["edges"] = {name: finite(value) for name, value in found.items()}


def _look_at_sizes(trial: Trial, part: Material, failures: EdgeInputs) -> None:
    height, width = part.images.shape[-2:]
    pair = part.take(range(min(2, len(part))))
    advice = f"It works for pictures of {width}×{height}; resize within the reward if it should take other sizes."
    for code, *size in edge_sizes(height, width):
        scored = trial.score(pair.changed(resize(pair.images, *size)))
        failures.look(code, f"{size[1]}×{size[0]} pixels", scored, WARNING, advice)


def _look_at_lengths(trial: Trial, part: Material, failures: EdgeInputs) -> None:
    pair = part.take(range(min(2, len(part))))
    advice = (
        f"It works for sounds of {pair.images.shape[-1]} samples in {pair.images.shape[1]} channels; cut, repeat or "
        "average within the reward if it should take others."
    )
    for code, name, sounds in edge_lengths(pair.images, pair.columns[SAMPLING_RATE]):
        failures.look(code, name, trial.score(pair.changed(sounds)), WARNING, advice)


def _look_at_prompts(trial: Trial, part: Material, failures: EdgeInputs, report: Report) -> None:
    for code, name, prompt in edge_prompts(part.prompts[0]):
        scored = trial.score(part.asked([prompt] * len(part)))
        # A prompt file cannot hold an empty prompt.
        severity = WARNING if code == "no-prompt" else FAULT
        advice = "Cut or clean the prompt within the reward: a prompt file may hold such prompts."
        if scored.failed:
            failures.look(code, f"a prompt ({name})", scored, severity, advice)
        elif scored.values.isnan().all():
            report.add(code, NOTE, f"NaN for a prompt ({name})", "This is fine if it is not meant to apply there.")


def compare_with_ordinary(values: Tensor, report: Report) -> None:
    """Report the samples at the edge that score above every ordinary sample; `values` [B] are the ordinary scores."""
    best = values[~values.isnan()].max().item()
    above = {name: value for name, value in report.tables["edges"].items() if value is not None and value > best}
    if above:
        listed = ", ".join(f"{name} {value:.4g}" for name, value in sorted(above.items(), key=lambda item: -item[1]))
        report.add(
            "degenerate", NOTE, f"these score above every ordinary sample (best {best:.4g}): {listed}",
            "A model that is trained for it may come to make these; list a guard beside it.", **above,
        )  # fmt: skip
