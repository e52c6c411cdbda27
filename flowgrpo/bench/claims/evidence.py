"""Intervals, the numbers of a run that claims rest on, and how their tests give a verdict.

Numbers are means over seeds with 95 % intervals of Student's t. Two methods are compared seed by seed. A claim rests on
some numbers, each with an interval. It is reproduced if every interval lies on the claimed side of its bound, not
reproduced if an interval lies beyond its bound, and otherwise undecided. Values that are all exactly at a bound show no
effect, and do not reproduce a claim. A number that is undecided says how many more values would decide it, if they
spread as the present values do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .intervals import Interval, needed, shares
from .results import Result
from .trainings import PAINT

# The held-out reward that methods are compared by. Every method of the table is trained on it. It is smooth, so that
# short runs move it by many standard errors.
SCORE = PAINT
MOST_DIGITS = 6
VERDICTS = ("reproduced", "not reproduced", "undecided", "not measured")


@dataclass(frozen=True)
class Evidence:
    """The results that claims are judged by.

    Attributes:
        runs: label → seed → result of a run that completed.
        failed: label → seeds on which the run failed.
        times: comparison → result of its timing.
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
class Measure:
    """A number that a claim is judged by, for the figure of all claims.

    Attributes:
        words: what the number is, in a few words.
        interval: the number that was measured.
        bound: where the interval must lie beyond.
        least: whether the claimed side is above the bound; if not, it is below.
        claimed: the paper's number; None if the paper gives no number.
        more: about how many more values decide; 0 if decided, None if very many or unknown.
        each: what a value is, in the plural.
        takes: what would decide, where more values would not.
        beyond: as of `judged`.
    """

    words: str
    interval: Interval
    bound: float
    least: bool
    claimed: float | None = None
    more: int | None = 0
    each: str = "seeds"
    takes: str = ""
    beyond: float = 0.0

    @property
    def refuting(self) -> float:
        """An interval wholly below this number refutes the claim; above it, if the claimed side is below."""
        return self.bound + self.beyond if self.least else self.bound - self.beyond

    def text(self, form: str) -> str:
        """The interval, with as many more digits as show on which side of its bounds it lies."""

        def sides(interval: Interval) -> list[bool | None]:
            return [interval.side(edge, self.least) for edge in (self.bound, self.refuting)]

        digits = int(form[-2])
        for more in range(digits, MOST_DIGITS + 1):
            if sides(self.interval.rounded(more)) == sides(self.interval):
                return self.interval.text(f"{form[:-2]}{more}f")
        return self.interval.text(form)


@dataclass(frozen=True)
class Statement:
    """A sentence, and whether its test holds (None: the interval covers the bound); a note has no test."""

    text: str
    holds: bool | None = None
    note: bool = False
    measure: Measure | None = None


def judged(
    text: str, words: str, values: Sequence[float], bound: float, least: bool, *,
    claimed: float | None = None, each: str = "seeds", form: str = ".2f", beyond: float = 0.0,
) -> Statement:  # fmt: skip
    """A sentence about the mean of some values, and the test of its side of a bound.

    Args:
        text: the sentence; `{}` is replaced by the interval.
        words: what the number is, in a few words.
        values: by seed or draw.
        bound: where the interval must lie beyond.
        least: whether the claimed side is above the bound.
        claimed: the paper's number.
        each: what a value is, in the plural.
        form: format of the interval, such as `+.2f`; see `Measure.text`.
        beyond: a claim of any effect at all is refuted if the interval lies below the bound plus the smallest effect
            that matters.
    """
    interval = Interval.of(values)
    holds = _side(interval, bound, least)
    refuted = interval.side(bound + beyond if least else bound - beyond, least) is False
    holds = True if holds else False if refuted else None
    more = _more(values, bound, beyond if least else -beyond, holds)
    measure = Measure(words, interval, bound, least, claimed, more, each, beyond=beyond)
    return Statement(text.format(measure.text(form)), holds, measure=measure)


def _side(interval: Interval, bound: float, least: bool) -> bool | None:
    """`Interval.side`; None for an interval that is nothing but its bound, as of a run that changes nothing."""
    return None if interval.low == interval.high == bound else interval.side(bound, least)


def _more(values: Sequence[float], bound: float, beyond: float, holds: bool | None) -> int | None:
    """How many more values decide, at the bound or at the edge of what matters."""
    if holds is not None:
        return 0
    counts = [count for edge in {bound, bound + beyond} if (count := needed(values, edge)) is not None]
    return max(min(counts) - len(values), 1) if counts else None


def compared(
    text: str, words: str, ours: Sequence[float], theirs: Sequence[float], bound: float, *,
    claimed: float | None = 1.0, beyond: float = 0.0,
) -> Statement:  # fmt: skip
    """A sentence about the share of a baseline's gain that a method has, and the test that it is above a bound.

    The test is of the mean of `ours − bound · theirs`. It decides only if the baseline itself gains.

    Args:
        text: the sentence; `{}` is replaced by the interval of the share.
        words: what the share is, in a few words.
        ours: gains of the method, by seed.
        theirs: gains of the baseline, by seed.
        bound: the least share.
        claimed: the paper's share.
        beyond: as of `judged`.
    """
    over = [[a - edge * b for a, b in zip(ours, theirs, strict=True)] for edge in (bound, bound + beyond)]
    above, below = (_side(Interval.of(values), 0.0, least=True) for values in over)
    holds = True if above else False if below is False else None
    counts = [count for values in over if (count := needed(values, 0.0)) is not None]
    if not _side(Interval.of(theirs), 0.0, least=True):
        holds = None
        counts = [count] if (count := needed(theirs, 0.0)) is not None else []
    more = 0 if holds is not None else max(min(counts) - len(ours), 1) if counts else None
    measure = Measure(words, shares(ours, theirs), bound, True, claimed, more, beyond=beyond)
    return Statement(text.format(measure.text(".2f")), holds, measure=measure)


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        name: name of the claim and of its figure.
        paper: short name and number.
        statement: the claim, with the bound that is used here if it is not obvious.
        judge: gives findings from evidence; called only if the results that the fields below name exist.
        runs: labels of the runs that the claim needs.
        times: the comparisons of seconds that the claim needs.
        probe: the probe that the claim needs.
        before: the verdict of the previous table, which compared the embedded recipes.
    """

    name: str
    paper: str
    statement: str
    judge: Callable[[Evidence], list[Statement]]
    runs: tuple[str, ...] = ()
    times: tuple[str, ...] = ()
    probe: str | None = None
    before: str = ""

    def answer(self, evidence: Evidence) -> tuple[str, list[Statement]]:
        """The verdict, and the findings that it rests on."""
        missing = [label for label in self.runs if not evidence.runs.get(label)]
        missing += [f"the timing {name}" for name in self.times if name not in evidence.times]
        missing += [f"the probe {self.probe}"] if self.probe and self.probe not in evidence.probes else []
        shared = evidence.common(self.runs)
        if not missing and self.runs and not shared.runs:
            missing = ["a common seed of " + ", ".join(self.runs)]
        if missing:
            return "not measured", [Statement("There is no result of " + ", ".join(missing) + ".", note=True)]
        findings = self.judge(shared)
        broken = {label: evidence.failed[label] for label in self.runs if evidence.failed.get(label)}
        findings += [Statement(f"{label} ended early on seed {_listed(seeds)}.") for label, seeds in broken.items()]
        tests = [finding.holds for finding in findings if not finding.note]
        if False in tests:
            return "not reproduced", findings
        return ("undecided" if None in tests else "reproduced"), findings


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


def score_at(run: Result, axis: str, place: float, name: str = SCORE) -> float:
    """The held-out score at a value of an axis (`iteration`, `updates`, `compute`, `seconds`), interpolated."""
    return float(np.interp(place, run["evaluation"][axis], run["evaluation"][name]))


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
