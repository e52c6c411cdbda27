"""Intervals, the numbers of a run that claims rest on, and how tests of them add up to a verdict.

Numbers are means over seeds with 95 % intervals of Student's t; two methods are compared by their difference on each
seed. A claim is reproduced if the interval of every number it rests on lies on the claimed side of its bound, not
reproduced if the interval of one lies beyond, and undecided otherwise: three seeds leave wide intervals.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from .results import Result

# The held-out reward that methods are compared by: partial credit, which every method of the table is trained on and
# which is less noisy than the share of satisfied prompts.
SCORE = "gold_dense"
VERDICTS = ("reproduced", "not reproduced", "undecided", "not measured")


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval, unbounded for a single value."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        """Of one or more independent values, by Student's t; unbounded if one of them is not a number."""
        found = list(values)
        mean = statistics.fmean(found)
        if len(found) == 1 or not math.isfinite(mean):
            return cls(mean, -math.inf, math.inf, len(found))
        half = float(student.ppf(0.975, len(found) - 1)) * statistics.stdev(found) / math.sqrt(len(found))
        return cls(mean, mean - half, mean + half, len(found))

    def at_most(self, bound: float) -> bool | None:
        """Whether it lies at or below a bound; None if the bound is inside."""
        return True if self.high <= bound else False if self.low > bound else None

    def at_least(self, bound: float) -> bool | None:
        """Whether it lies at or above a bound; None if the bound is inside."""
        return True if self.low >= bound else False if self.high < bound else None

    def text(self, form: str = "+.3f") -> str:
        """As `mean [low, high]`."""
        if not math.isfinite(self.mean):
            return "no number"
        if self.count == 1:
            return f"{self.mean:{form}} (one value)".replace("-", "−")
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]".replace("-", "−")


@dataclass(frozen=True)
class Evidence:
    """The results that claims are judged by.

    Attributes:
        runs: label → seed → result of a run that ended well.
        failed: label → seeds on which the run did not.
        times: method → its timing.
        probes: name → its result.
    """

    runs: Mapping[str, Mapping[int, Result]]
    failed: Mapping[str, Sequence[int]]
    times: Mapping[str, Result]
    probes: Mapping[str, Result]

    def each(self, label: str, figure: Callable[[Result], float]) -> list[float]:
        """A number of a method's run on every seed, by rising seed."""
        return [figure(run) for _, run in sorted(self.runs[label].items())]

    def difference(self, one: str, other: str, figure: Callable[[Result], float]) -> Interval:
        """Of a number between two methods, by seed."""
        return Interval.of(a - b for a, b in zip(self.each(one, figure), self.each(other, figure), strict=True))

    def common(self, labels: Sequence[str]) -> Evidence:
        """The same with the runs of these labels on those seeds only that all of them have."""
        shared = set.intersection(*(set(self.runs.get(label, ())) for label in labels)) if labels else set()
        kept = {label: {seed: self.runs[label][seed] for seed in sorted(shared)} for label in labels if shared}
        return Evidence(kept, self.failed, self.times, self.probes)


@dataclass(frozen=True)
class Statement:
    """A sentence, and whether what it tests holds (None: the interval covers both); a note tests nothing."""

    text: str
    holds: bool | None = None
    note: bool = False


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        name: of its figure.
        paper: short name and number.
        statement: what it says, with the bound that it is held to here where that is not plain.
        judge: evidence to findings; called only if all that is named below is there.
        runs: labels of the runs it needs.
        times: methods whose timing it needs.
        probe: the probe it needs.
    """

    name: str
    paper: str
    statement: str
    judge: Callable[[Evidence], list[Statement]]
    runs: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    probe: str | None = None

    def answer(self, evidence: Evidence) -> tuple[str, list[Statement]]:
        """The verdict and what it rests on."""
        missing = [label for label in self.runs if not evidence.runs.get(label)]
        missing += [f"the timing of {name}" for name in self.times if name not in evidence.times]
        missing += [f"the probe {self.probe}"] if self.probe and self.probe not in evidence.probes else []
        shared = evidence.common(self.runs)
        if not missing and self.runs and not shared.runs:
            missing = ["a seed that they share: " + ", ".join(self.runs)]
        if missing:
            return "not measured", [Statement("There is no result of " + ", ".join(missing) + ".", note=True)]
        findings = self.judge(shared)
        broken = {label: evidence.failed[label] for label in self.runs if evidence.failed.get(label)}
        findings += [Statement(f"{label} ended early on seed {_listed(seeds)}.") for label, seeds in broken.items()]
        tested = [finding.holds for finding in findings if not finding.note]
        if False in tested:
            return "not reproduced", findings
        return ("undecided" if None in tested else "reproduced"), findings


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


# -- numbers of a run --------------------------------------------------------------------------------------------------


def final(run: Result, name: str = SCORE) -> float:
    """A held-out reward at the end of a run."""
    return _known(run["evaluation"][name][-1])


def gain(run: Result, name: str = SCORE) -> float:
    """What a held-out reward gained over a run."""
    return final(run, name) - _known(run["evaluation"][name][0])


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def score_at(run: Result, axis: str, place: float) -> float:
    """The held-out score where an axis (`iteration`, `updates`, `compute`, `seconds`) has come to a place."""
    return float(np.interp(place, run["evaluation"][axis], run["evaluation"][SCORE]))


def first_reach(run: Result, axis: str, target: float) -> float | None:
    """Where the held-out score first comes to a target, between evaluations by a straight line; None if never."""
    places, scores = run["evaluation"][axis], run["evaluation"][SCORE]
    for k, score in enumerate(scores):
        if score >= target:
            if k == 0:
                return float(places[0])
            share = (target - scores[k - 1]) / (score - scores[k - 1])
            return float(places[k - 1] + share * (places[k] - places[k - 1]))
    return None


def lopsided(run: Result) -> float:
    """How far the log-ratios lie to one side: mean over steps of |mean| over standard deviation."""
    sides = [abs(s["mean"]) / math.sqrt(s["var"]) for s in run["steps"].values() if s["var"] > 0]
    return statistics.fmean(sides) if sides else math.nan


def unevenness(run: Result) -> float:
    """Largest over smallest standard deviation of the log-ratio among steps."""
    deviations = [math.sqrt(s["var"]) for s in run["steps"].values() if s["var"] > 0]
    return max(deviations) / min(deviations) if deviations else math.nan


def kept_signal(run: Result) -> float:
    """Mean gradient norm in the third of the iterations with most degenerate groups over that with the fewest."""
    curves = run["curves"]
    pairs = sorted((d, g) for d, g in zip(curves["degenerate_groups"], curves["grad_norm"]) if None not in (d, g))
    third = max(len(pairs) // 3, 1)
    norms = [norm for _, norm in pairs]
    least = sum(norms[:third])
    return sum(norms[-third:]) / least if least else math.nan


def time_ratio(evidence: Evidence, method: str, baseline: str) -> Interval:
    """Seconds of an iteration over those of a baseline, timed in turn in one process."""
    seconds = evidence.times[method]["seconds"]
    return Interval.of(a / b for a, b in zip(seconds[method], seconds[baseline], strict=True))
