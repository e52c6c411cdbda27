"""`flowgrpo bench claims`: measures what is missing, then reports on all results."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

from ...configs.load import RecipeError, recipe_names
from ...parts.traits import trained
from .claim_tables import NO_RISE
from .evidence import Claim, Evidence
from .forms import FORMS
from .order import order
from .papers import CLAIMS
from .probes import PROBES, find_probe, measure_probe
from .report import Results, write_report
from .results import Result, Settings
from .rises import find_rise, measure_rises, refuse_few_prompts, rise_recipe
from .timings import FAMILIES, find_time, measure_times
from .trainings import Job, Report, find_run, jobs, measure_run, recipe_of

# No claim gets more seeds than this, whatever the budget.
MOST_SEEDS = 12
MOST_SCALE = 1_000_000
"""No run of this length ends. Much larger factors give no number of iterations at all."""
_WAIT = 20.0


def claims(settings: Settings, names: Sequence[str], out: Path, report: Report, only_report: bool = False) -> None:
    """Measure what is missing and write the report.

    Timings come first, then probes, then runs, in the order of `order`, and then short runs of every recipe. A run
    begins only while the budget lasts.

    Args:
        settings: settings of the table.
        names: claims to measure, and recipes to make a short run of; everything if empty. The report always has all
            results.
        out: folder of the report.
        report: called with lines of progress.
        only_report: measure nothing.

    Raises:
        ValueError: a name is not a claim and not a recipe, or short runs would have too few held-out prompts.
    """
    chosen, methods = choose(names)
    if not only_report:
        rising = [name for name in methods if _rises(settings, name)]
        refuse_few_prompts(settings, rising)
        began = time.monotonic()
        settings.results.mkdir(parents=True, exist_ok=True)
        needed = {name for claim in chosen for name in claim.times}
        measure_times(settings, [name for name in FAMILIES if name in needed], report)
        for name in [name for name in PROBES if name in {claim.probe for claim in chosen}]:
            measure_probe(settings, name, report)
        _measure_runs(settings, chosen, began + 3600 * settings.budget, report)
        measure_rises(settings, rising, report)
    found = gather(settings)
    report(f"report: {write_report(found, out)}")


def _measure_runs(settings: Settings, chosen: Sequence[Claim], end: float, report: Report) -> None:
    """Make runs until every claim is decided, has `MOST_SEEDS` seeds, or the budget is spent."""
    known = jobs()
    while True:
        evidence = gather(settings).evidence
        made = {label: {*evidence.runs.get(label, ()), *evidence.failed.get(label, ())} for label in known}
        todo = order([(claim, *claim.answer(evidence)) for claim in chosen], made, settings.seeds, MOST_SEEDS)
        if not todo:
            report("every run that claims need has a result")
            return
        if time.monotonic() >= end:
            report(
                f"the budget of {settings.budget:g} h is spent; runs that are missing, first to last: {_named(todo)}"
            )
            return
        report(f"{len(todo)} runs to make, at most {(end - time.monotonic()) / 60:.0f} minutes left")
        if not any(measure_run(settings, known[label], seed, report) for label, seed in todo):
            time.sleep(_WAIT)  # another process makes them all, and its results may ask for more


def _named(runs: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{label} (seed {seed})" for label, seed in runs)


def seeds_of(text: str) -> tuple[int, ...]:
    """The seeds that an option lists, each once.

    Raises:
        ValueError: the text is no list of numbers.
    """
    listed = text.split(",")
    if not all(seed.strip().isdecimal() for seed in listed):
        raise ValueError(f"--seeds is {text!r}; write numbers with commas between them, such as 0,1,2")
    return tuple(dict.fromkeys(int(seed) for seed in listed))


def settings_of(
    results: Path, words: Sequence[str], seeds: str, scale: float, any_code: bool, budget: float = 1.0
) -> tuple[Settings, list[str]]:
    """Settings of the table from the words of a command, and the names of what to measure.

    Raises:
        ValueError: `seeds` is no list of numbers, `scale` is not above 0 or is above `MOST_SCALE`, or `budget` is not a
            number of 0 or more.
    """
    if not 0 < scale <= MOST_SCALE:
        raise ValueError(f"--scale is {scale:g}; use a number above 0 and at most {MOST_SCALE:,}, such as 1")
    if not 0 <= budget < math.inf:
        raise ValueError(f"--budget is {budget:g}; use a number of hours, such as 1.5, or 0 for no runs")
    overrides = tuple(word for word in words if "=" in word)
    return Settings(results, seeds_of(seeds), scale, overrides, any_code, budget), [
        word for word in words if "=" not in word
    ]


def choose(names: Sequence[str]) -> tuple[list[Claim], list[str]]:
    """The claims with these names, and the recipes with these names, which get a short run.

    Some names belong to a claim and to a recipe; then both are meant.

    Raises:
        ValueError: a name is not a claim and not a recipe.
    """
    known, methods = {claim.name: claim for claim in CLAIMS}, list(recipe_names("images"))
    for name in names:
        if name not in known and name not in methods:
            raise ValueError(f"no claim or recipe {name!r} to measure; use {', '.join([*known, *methods])}")
    if not names:
        return list(CLAIMS), methods
    return [known[n] for n in names if n in known], [n for n in names if n in methods]


def gather(settings: Settings) -> Results:
    """All results that belong to the table, of every seed that has one."""
    used: list[Result] = []
    runs: dict[str, dict[int, Result]] = {}
    failed: dict[str, list[int]] = {}
    for label, job in jobs().items():
        for seed in _seeds(settings, label):
            result = find_run(settings, job, seed) if _fits(settings, job) else None
            if result is None:
                continue
            used.append(result)
            if "failed" in result:
                failed.setdefault(label, []).append(seed)
            else:
                runs.setdefault(label, {})[seed] = result
    times = {name: found for name in FAMILIES if (found := find_time(settings, name)) is not None}
    probed = {name: found for name in PROBES if (found := find_probe(settings, name)) is not None}
    methods = [name for name in recipe_names("images") if _rises(settings, name)]
    rises = {name: found for name in methods if (found := find_rise(settings, name)) is not None}
    used += [*times.values(), *probed.values(), *rises.values()]
    files = {result["file"] for result in used}
    unused = sorted(path.name for path in settings.results.glob("*.json") if path.name not in files)
    embedded = [name for name, form in FORMS.items() if not form.published]
    return Results(settings, Evidence(runs, failed, times, probed), used, unused, list(runs), rises, embedded)


def _seeds(settings: Settings, label: str) -> list[int]:
    """Seeds of the result files of a label."""
    numbers = {
        int(found[1])
        for path in settings.results.glob("*-seed*-*.json")
        if (found := re.fullmatch(rf"{re.escape(label)}-seed(\d+)-[0-9a-f]+\.json", path.name))
    }
    return sorted(numbers)


def _rises(settings: Settings, method: str) -> bool:
    """Whether a recipe has a short run, and the overrides make sense for it."""
    try:
        return trained(rise_recipe(settings, method)) not in NO_RISE
    except RecipeError:
        return False


def _fits(settings: Settings, job: Job) -> bool:
    """Whether the overrides make sense for a job; if not, it cannot have a result."""
    try:
        recipe_of(job, 0, settings)
    except RecipeError:
        return False
    return True
