"""Intervals, the numbers of a run that claims rest on, and how their tests give a verdict.

Numbers are means over seeds with 95 % intervals of Student's t. Two methods are compared by their difference on each
seed. A claim rests on some numbers, each with an interval. It is reproduced if every interval lies on the claimed side
of its bound, not reproduced if an interval lies beyond its bound, and otherwise undecided. With three seeds the
intervals are wide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from .results import Result

# The held-out reward that methods are compared by: partial credit. Every method of the table is trained on it, and it
# is less noisy than the share of satisfied prompts.
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
        """The interval of one or more independent values, by Student's t; unbounded if one of them is no number."""
        found = list(values)
        mean = statistics.fmean(found)
        if len(found) == 1 or not math.isfinite(mean):
            return cls(mean, -math.inf, math.inf, len(found))
        half = float(student.ppf(0.975, len(found) - 1)) * statistics.stdev(found) / math.sqrt(len(found))
        return cls(mean, mean - half, mean + half, len(found))

    def at_most(self, bound: float) -> bool | None:
        """Whether the interval lies at or below a bound; None if the bound is inside."""
        return True if self.high <= bound else False if self.low > bound else None

    def at_least(self, bound: float) -> bool | None:
        """Whether the interval lies at or above a bound; None if the bound is inside."""
        return True if self.low >= bound else False if self.high < bound else None

    def text(self, form: str = "+.3f") -> str:
        """The interval as `mean [low, high]`."""
        if not math.isfinite(self.mean):
            return "no number"
        if self.count == 1:
            return f"{self.mean:{form}} (one value)".replace("-", "−")
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]".replace("-", "−")


@dataclass(frozen=True)
class Evidence:
    """The results that claims are judged by.

    Attributes:
        runs: label → seed → result of a run that completed.
        failed: label → seeds on which the run failed.
        times: method → result of its timing.
        probes: name → result of the probe.
    """

    runs: Mapping[str, Mapping[int, Result]]
    failed: Mapping[str, Sequence[int]]
    times: Mapping[str, Result]
    probes: Mapping[str, Result]

    def each(self, label: str, figure: Callable[[Result], float]) -> list[float]:
        """A number of a method's run for every seed, in increasing order of the seeds."""
        return [figure(run) for _, run in sorted(self.runs[label].items())]

    def difference(self, one: str, other: str, figure: Callable[[Result], float]) -> Interval:
        """The interval of the difference of a number between two methods, seed by seed."""
        return Interval.of(a - b for a, b in zip(self.each(one, figure), self.each(other, figure), strict=True))

    def common(self, labels: Sequence[str]) -> Evidence:
        """The evidence with only the runs of these labels, on only the seeds that all of them have."""
        shared = set.intersection(*(set(self.runs.get(label, ())) for label in labels)) if labels else set()
        kept = {label: {seed: self.runs[label][seed] for seed in sorted(shared)} for label in labels if shared}
        return Evidence(kept, self.failed, self.times, self.probes)


@dataclass(frozen=True)
class Statement:
    """A sentence, and whether its test holds (None: the interval covers the bound); a note has no test."""

    text: str
    holds: bool | None = None
    note: bool = False


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        name: name of the claim and of its figure.
        paper: short name and number.
        statement: the claim, with the bound that is used here if it is not obvious.
        judge: gives findings from evidence; called only if the results that the fields below name exist.
        runs: labels of the runs that the claim needs.
        times: methods whose timing the claim needs.
        probe: the probe that the claim needs.
    """

    name: str
    paper: str
    statement: str
    judge: Callable[[Evidence], list[Statement]]
    runs: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    probe: str | None = None

    def answer(self, evidence: Evidence) -> tuple[str, list[Statement]]:
        """The verdict, and the findings that it rests on."""
        missing = [label for label in self.runs if not evidence.runs.get(label)]
        missing += [f"the timing of {name}" for name in self.times if name not in evidence.times]
        missing += [f"the probe {self.probe}"] if self.probe and self.probe not in evidence.probes else []
        shared = evidence.common(self.runs)
        if not missing and self.runs and not shared.runs:
            missing = ["a common seed of " + ", ".join(self.runs)]
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
    """The gain of a held-out reward over a run."""
    return final(run, name) - _known(run["evaluation"][name][0])


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def score_at(run: Result, axis: str, place: float) -> float:
    """The held-out score at a value of an axis (`iteration`, `updates`, `compute`, `seconds`), interpolated."""
    return float(np.interp(place, run["evaluation"][axis], run["evaluation"][SCORE]))


def first_reach(run: Result, axis: str, target: float) -> float | None:
    """The first place on an axis where the held-out score reaches a target, interpolated linearly; None if never."""
    places, scores = run["evaluation"][axis], run["evaluation"][SCORE]
    for k, score in enumerate(scores):
        if score >= target:
            if k == 0:
                return float(places[0])
            share = (target - scores[k - 1]) / (score - scores[k - 1])
            return float(places[k - 1] + share * (places[k] - places[k - 1]))
    return None


def lopsided(run: Result) -> float:
    """How far the log-ratios lie to one side: the mean over steps of |mean| / standard deviation."""
    sides = [abs(s["mean"]) / math.sqrt(s["var"]) for s in run["steps"].values() if s["var"] > 0]
    return statistics.fmean(sides) if sides else math.nan


def unevenness(run: Result) -> float:
    """The largest standard deviation of the log-ratio among the steps, divided by the smallest."""
    deviations = [math.sqrt(s["var"]) for s in run["steps"].values() if s["var"] > 0]
    return max(deviations) / min(deviations) if deviations else math.nan


def kept_signal(run: Result) -> float:
    """Mean gradient norm where groups are degenerate, relative to where they are not.

    The norm in the third of the iterations with most degenerate groups is divided by the norm in the third with fewest.
    """
    curves = run["curves"]
    pairs = sorted((d, g) for d, g in zip(curves["degenerate_groups"], curves["grad_norm"]) if None not in (d, g))
    third = max(len(pairs) // 3, 1)
    norms = [norm for _, norm in pairs]
    least = sum(norms[:third])
    return sum(norms[-third:]) / least if least else math.nan


def time_ratio(evidence: Evidence, method: str, baseline: str) -> Interval:
    """Seconds of an iteration divided by the seconds of a baseline's iteration, timed in turn in one process."""
    seconds = evidence.times[method]["seconds"]
    return Interval.of(a / b for a, b in zip(seconds[method], seconds[baseline], strict=True))
