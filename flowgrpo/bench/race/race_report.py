"""The report on the race: compute and seconds to a gain, as a page, as JSON, and as a figure."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...configs.load import recipe_names
from ...training.folder.run_folder import write_text
from ..claims.claim_tables import grid
from ..claims.intervals import Interval
from ..claims.line_charts import Panel, Series, draw
from ..claims.report import machines, origins, plain
from ..claims.results import Result, Settings, naming, stamp, unreadable
from ..claims.trainings import Report
from .race_runs import (
    COMPUTE,
    DEFAULT,
    RACERS,
    RATES,
    SCORE,
    RaceSettings,
    Standing,
    gain_at_end,
    measure_race,
    standing,
)

GAINS = (0.05, 0.10)
FEWEST = 3
"""With fewer runs than this, an interval is too wide to be of use, and the report shows none."""
AXES = {"compute": "states, with gradients × 3", "seconds": "seconds of training"}


@dataclass(frozen=True)
class Reach:
    """Where the runs of a recipe reach a gain.

    Attributes:
        reached: number of runs that reach it.
        runs: number of runs; failed runs count too.
        places: geometric mean of the places with its 95 % interval; None unless every run reaches the gain.
        least: geometric mean of the places, with the end of a run in place of what the run does not reach: a lower
            bound. Runs that failed are not in it; NaN if all failed.
    """

    reached: int
    runs: int
    places: Interval | None
    least: float

    def text(self) -> str:
        """The cell of a table."""
        if not self.runs:
            return "–"
        if self.places is None and not math.isfinite(self.least):
            return f"– ({self.reached} of {self.runs} reach it)"
        if self.places is None:
            return f"over {_short(self.least)} ({self.reached} of {self.runs} reach it)"
        if self.runs < FEWEST:
            return f"{_short(self.places.mean)} ({'one run' if self.runs == 1 else f'{self.runs} runs'})"
        return f"{_short(self.places.mean)} [{_short(self.places.low)}, {_short(self.places.high)}]"


def first_place(run: Result, axis: str, gain: float) -> float | None:
    """The first place on an axis from which two evaluations in a row, or the last one, show a gain; None if never.

    A single evaluation would often show a gain too early, because there are many of them and each has an error.
    """
    places, scores = run["evaluation"][axis], run["evaluation"][SCORE]
    above = [score - scores[0] >= gain for score in scores]
    for k, (here, there) in enumerate(zip(above, [*above[1:], True])):
        if here and there:
            share = (gain - (scores[k - 1] - scores[0])) / (scores[k] - scores[k - 1])
            return float(places[k - 1] + share * (places[k] - places[k - 1]))
    return None


def reach(runs: Sequence[Result], axis: str, gain: float, failed: int = 0) -> Reach:
    """Where runs reach a gain on an axis.

    Args:
        runs: the runs that completed.
        axis: a name of `AXES`.
        gain: the gain of the score.
        failed: number of further runs, which failed. None of them reaches the gain.
    """
    found = [first_place(run, axis, gain) for run in runs]
    known = [place for place in found if place is not None]
    ends = [run["evaluation"][axis][-1] if place is None else place for run, place in zip(runs, found)]
    least = math.exp(statistics.fmean(map(math.log, ends))) if ends else math.nan
    count = len(found) + failed
    if not known or len(known) < count:
        return Reach(len(known), count, None, least)
    logs = Interval.of(map(math.log, known))
    low, high = (math.exp(v) if math.isfinite(v) else math.nan for v in (logs.low, logs.high))
    return Reach(count, count, Interval(math.exp(logs.mean), low, high, len(known)), least)


def race(settings: Settings, names: Sequence[str], out: Path, report: Report, only_report: bool = False) -> None:
    """Make the runs that are missing, and write the report.

    Args:
        settings: settings of the race. An override `RECIPE=RATE` names a recipe that runs with this learning rate.
        names: the other recipes that run; all `RACERS` if no recipe is named.
        out: folder of the report.
        report: called with lines of progress.
        only_report: make no run.

    Raises:
        ValueError: a name is not a recipe for images, or a learning rate is not a number above 0.
    """
    known = recipe_names("images")
    for name in names:
        if name not in known:
            raise ValueError(f"no recipe {name!r} for the race; use {', '.join(known)}")
    found = with_rates(settings, known)
    methods = list(dict.fromkeys([*names, *(method for method, _ in found.given)])) or list(RACERS)
    if not only_report:
        found.results.mkdir(parents=True, exist_ok=True)
        measure_race(found, methods, report)
    report(f"report: {write_race(found, [standing(found, method) for method in methods], out)}")


def with_rates(settings: Settings, known: Container[str]) -> RaceSettings:
    """Settings in which the overrides `RECIPE=RATE` have become learning rates.

    Args:
        settings: settings of a command.
        known: names of the recipes.

    Raises:
        ValueError: a rate is not a number above 0, or is of the default.
    """
    pairs = [(word.partition("=")[0].strip(), word) for word in settings.overrides]
    given = {name: _rate(name, word.partition("=")[2]) for name, word in pairs if name in known}
    rest = tuple(word for name, word in pairs if name not in known)
    return RaceSettings(**{**vars(settings), "overrides": rest, "given": tuple(given.items())})


def _rate(name: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if name == DEFAULT:
        raise ValueError(f"{DEFAULT}={text}: {DEFAULT} runs with its own learning rate; write {DEFAULT} alone")
    if not 0 < rate < math.inf:
        raise ValueError(f"{name}={text}: the learning rate must be a number above 0, such as {name}=0.0006")
    return rate


def write_race(settings: RaceSettings, standings: Sequence[Standing], out: Path) -> Path:
    """Write `race.md`, `race.json` and `race.svg` into a folder; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    used = [run for one in standings for run in one.runs.values()]
    # Without any_code, no file but the results of this code is looked at.
    unused = unreadable(settings.results, "race-*.json") if settings.any_code else []
    data = {
        "command": command(settings, standings),
        "package": asdict(stamp()),
        "hardware": machines(used),
        "recipes": {one.method: figures(one) for one in standings},
        "other_code": sorted(run["file"] for run in used if run.get("other_code")),
        "unused": unused,
    }
    text = json.dumps(plain(data), indent=1, allow_nan=False, ensure_ascii=False)
    write_text(out / "race.json", text + "\n")
    write_text(out / "race.svg", figure(standings))
    write_text(out / "race.md", page(settings, standings, used, unused))
    return out / "race.md"


def figures(standing: Standing) -> dict[str, Any]:
    """The numbers of one recipe."""
    runs = list(standing.runs.values())
    found: dict[str, Any] = {"rate": standing.rate, "choices": standing.choices, "whole": standing.whole}
    settled = (standing.rate is not None or standing.method == DEFAULT) and not standing.compared
    found |= {"settled": settled, "seeds": sorted(standing.runs), "failed": list(standing.failed)}
    if runs:
        found["gain"] = Interval.of(map(gain_at_end, runs))
    if runs or standing.failed:
        found["reach"] = {
            axis: {f"{gain:g}": asdict(reach(runs, axis, gain, len(standing.failed))) for gain in GAINS}
            for axis in AXES
        }
    if runs:
        found["curves"] = {
            seed: {k: run["evaluation"][k] for k in (*AXES, SCORE)} for seed, run in standing.runs.items()
        }
    return found


def figure(standings: Sequence[Standing]) -> str:
    """Gain over compute and over seconds: the mean of the seeds, up to the end of the shortest run."""
    panels = []
    for axis, label in AXES.items():
        lines = [Series(one.method, *mean_gain(list(one.runs.values()), axis)) for one in standings if one.runs]
        panels.append(Panel(f"gain of {SCORE} on the test prompts", label, lines))
    return draw("The race: what a recipe learns from the same compute", panels, height=400)


def mean_gain(runs: Sequence[Result], axis: str) -> tuple[list[float], list[float]]:
    """Places on an axis, and the mean gain of runs there."""
    curves = [
        (run["evaluation"][axis], np.subtract(run["evaluation"][SCORE], run["evaluation"][SCORE][0])) for run in runs
    ]
    end = min(places[-1] for places, _ in curves)
    grid_of = [place for place in curves[0][0] if place < end] + [end]
    return grid_of, [float(np.mean([np.interp(place, x, y) for x, y in curves])) for place in grid_of]


def page(
    settings: RaceSettings, standings: Sequence[Standing], used: Sequence[Result], unused: Sequence[str] = ()
) -> str:
    """The page as Markdown.

    Args:
        settings: settings of the race.
        standings: what is known of each recipe.
        used: the results in the table.
        unused: names of result files that cannot be read.
    """
    head = ["recipe", "learning rate", "seeds", "gain at the end"]
    head += [f"{name} to +{gain:.2f}" for gain in GAINS for name in ("states", "seconds")]
    rows = []
    for one in standings:
        runs = list(one.runs.values())
        rate = "as it is" if one.method == DEFAULT else "–" if one.rate is None else f"{one.rate:g}"
        rate += " (given)" * one.given
        seeds = ", ".join(map(str, sorted(one.runs))) or "–"
        seeds += f"; failed: {', '.join(map(str, one.failed))}" * bool(one.failed)
        cells = [reach(runs, axis, gain, len(one.failed)).text() for gain in GAINS for axis in AXES]
        rows.append([f"`{one.method}`", rate, seeds, _gains(runs), *cells])
    parts = [
        "# The race",
        "![Gain over states and over seconds, for each recipe](race.svg)",
        grid(head, rows),
        *_missing(settings, standings),
        "## How it is measured",
        _how(settings, standings, machines(used)),
        *origins(used),
        *_damaged(unused),
        *_rates(standings),
        *_unsettled(standings),
    ]
    return "\n\n".join(parts) + "\n"


def _damaged(unused: Sequence[str]) -> list[str]:
    """A paragraph about result files that cannot be read; nothing if there are none."""
    said = "These result files are damaged or have the name of another result, and are not used; remove them: "
    return [f"{said}{', '.join(unused)}."] if unused else []


def _gains(runs: Sequence[Result]) -> str:
    """The mean gain at the end with its interval; the gains themselves if the runs are few."""
    gains = [gain_at_end(run) for run in runs]
    if len(gains) < FEWEST:
        return ", ".join(f"{gain:+.3f}".replace("-", "−") for gain in gains) or "–"
    return Interval.of(gains).text()


def _missing(settings: Settings, standings: Sequence[Standing]) -> list[str]:
    """A paragraph about the runs that the report lacks; nothing if it has all."""
    lacking = {
        one.method: [str(seed) for seed in settings.seeds if seed not in one.runs and seed not in one.failed]
        for one in standings
    }
    words = [f"`{name}` {', '.join(seeds)}" for name, seeds in lacking.items() if seeds]
    return [f"Seeds that have no run yet: {'; '.join(words)}."] if words else []


def _choosers(standings: Sequence[Standing]) -> list[Standing]:
    """The recipes that choose their learning rate."""
    return [one for one in standings if one.method != DEFAULT and not one.given]


def _rates(standings: Sequence[Standing]) -> list[str]:
    """A section with the scores by which learning rates were chosen; nothing if none were chosen."""
    rows = []
    for one in _choosers(standings):
        scores = [found.get(rate, "–") for found in (one.choices, one.whole) for rate in RATES]
        cells = ["failed" if s is None else s if isinstance(s, str) else f"{s:.3f}" for s in scores]
        rows.append([f"`{one.method}`", *cells])
    lengths = [f"{length}, {rate:g}" for length in ("short", "whole") for rate in RATES]
    head = "## How the learning rates were chosen"
    words = f"Mean {SCORE} on the held-out prompts in the second half of a run:"
    return [head, words, grid(["recipe", *lengths], rows)] if rows else []


def _unsettled(standings: Sequence[Standing]) -> list[str]:
    """A paragraph about the rates that only short runs have chosen; nothing if there are none."""
    names = [f"`{one.method}`" for one in standings if one.compared]
    return [f"Whole runs are missing for the rate of: {', '.join(names)}."] if names else []


def _how(settings: RaceSettings, standings: Sequence[Standing], hardware: Sequence[str]) -> str:
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    choice = (
        f"Its learning rate is chosen from {rates} on the held-out prompts, with another seed. Runs of a quarter of "
        "the compute have every rate. Then whole runs compare the best rate with the next smaller one, and the choice "
        "goes down while the smaller rate is better. "
    )
    broken = " A run that failed does not reach the gain, and does not count in the mean."
    gift = "A learning rate that the table calls given was an argument of the command. "
    lines = [
        f"Every published recipe gets {settings.scale * COMPUTE:,.0f} states of its rollouts and updates. A state "
        "with gradients counts as three. Where a recipe has an old policy or a reference, their states count too, and "
        "its run has more states in all. "
        "The schedule of its learning rate stretches over the run. Averages of the weights, and old policies that lag "
        "more with every step, keep their own pace. "
        + choice * bool(_choosers(standings))
        + gift * any(one.given for one in standings)
        + "The default runs as it is, so its run may be shorter.",
        f"The score is {SCORE} on the test prompts, one image each. Evaluations count neither as states nor as "
        "seconds. On a CPU, seconds are processor seconds, so that other work on the machine hardly counts. A gain is "
        "reached where the line to the first of two evaluations in a row that show it crosses the gain; the last "
        "evaluation needs no second one. A cell has the geometric mean of the seeds, and its 95 % interval if there "
        "are three or more. If a run never reaches the gain, the cell has a lower bound: the geometric mean in which "
        "the run counts with its end." + broken * any(one.failed for one in standings),
        f"Measured with `{command(settings, standings)}`." + "".join(f" {machine}." for machine in hardware),
    ]
    return "\n\n".join(lines)


def command(settings: RaceSettings, standings: Sequence[Standing]) -> str:
    """The command line that makes this report."""
    named = [one.method if not one.given else f"{one.method}={one.rate:g}" for one in standings]
    words = ["flowgrpo", "bench", "race", *(named if named != list(RACERS) else []), *settings.overrides]
    words += ["--seeds", ",".join(map(str, settings.seeds))]
    words += ["--scale", f"{settings.scale:g}", "--budget", f"{settings.budget:g}"]
    words += naming(settings, "race")
    return shlex.join(words + ["--any-code"] * settings.any_code)


def _short(value: float) -> str:
    if not math.isfinite(value):
        return "?"
    return f"{value / 1000:,.1f}k" if value >= 999.5 else f"{value:.0f}"
