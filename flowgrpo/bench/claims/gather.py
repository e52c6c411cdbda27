"""`flowgrpo bench claims`: measures what is missing, then reports on all results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...configs.load import RecipeError
from .evidence import Evidence
from .probes import find_probe, find_time, measure_probe, measure_times, probes
from .report import Results, write_report
from .results import Result, Settings
from .rises import find_rise, measure_rises
from .trainings import Job, Report, find_run, jobs, measure_run, recipe_of


def claims(settings: Settings, names: Sequence[str], out: Path, report: Report, only_report: bool = False) -> None:
    """Measure what is missing and write the report.

    Timings come first, then probes, then short runs, then runs. Runs are made seed by seed, so that the table is
    complete after the first seed, although its intervals are still wide.

    Args:
        settings: settings of the table.
        names: methods, variants and probes to measure; everything if empty. The report always has all results.
        out: folder of the report.
        report: called with lines of progress.
        only_report: measure nothing.

    Raises:
        ValueError: a name is not a method, a variant or a probe.
    """
    chosen, probed = choose(names)
    if not only_report:
        settings.results.mkdir(parents=True, exist_ok=True)
        methods = list(dict.fromkeys(job.method for job in chosen))
        measure_times(settings, methods, report)
        for name in probed:
            measure_probe(settings, name, report)
        measure_rises(settings, methods, report)
        todo = [(job, seed) for seed in settings.seeds for job in chosen if find_run(settings, job, seed) is None]
        report(_forecast(settings, todo, len(chosen) * len(settings.seeds)))
        for count, (job, seed) in enumerate(todo, 1):
            report(f"run {count} of {len(todo)}: {job.label}, seed {seed}")
            measure_run(settings, job, seed, report)
    found = gather(settings)
    report(f"report: {write_report(found, out)}")


def settings_of(
    results: Path, words: Sequence[str], seeds: str, scale: float, any_code: bool
) -> tuple[Settings, list[str]]:
    """Settings of the table from the words of a command, and the names of what to measure.

    Raises:
        ValueError: `seeds` is no list of numbers, or `scale` is not above 0.
    """
    listed = seeds.split(",")
    if not all(seed.strip().isdecimal() for seed in listed):
        raise ValueError(f"--seeds is {seeds!r}; write numbers with commas between them, such as 0,1,2")
    if not scale > 0:
        raise ValueError(f"--scale is {scale:g}; use a number above 0, such as 1")
    numbers = tuple(dict.fromkeys(int(seed) for seed in listed))
    overrides = tuple(word for word in words if "=" in word)
    return Settings(results, numbers, scale, overrides, any_code), [word for word in words if "=" not in word]


def choose(names: Sequence[str]) -> tuple[list[Job], list[str]]:
    """Runs and probes of these names; the name of a method includes its variants.

    Raises:
        ValueError: a name is not a method, a variant or a probe.
    """
    known, probed = jobs(), probes()
    for name in names:
        if name not in known and name not in probed:
            raise ValueError(f"no method {name!r} to measure; use {', '.join([*known, *probed])}")
    if not names:
        return list(known.values()), probed
    return [j for j in known.values() if {j.label, j.method} & set(names)], [name for name in probed if name in names]


def _forecast(settings: Settings, todo: Sequence[tuple[Job, int]], total: int) -> str:
    """A line that says how many runs are left, and how long they take if all of their methods have been timed."""
    said = f"{total - len(todo)} of {total} runs have results"
    seconds = 0.0
    for job, seed in todo:
        timed = find_time(settings, job.method)
        if timed is None:
            return said
        own = timed["seconds"][job.method]
        seconds += sum(own) / len(own) * recipe_of(job, seed, settings).run.iterations
    return f"{said}; by the timings, the others need about {seconds / 3600:.1f} h of training, without evaluations"


def gather(settings: Settings) -> Results:
    """All results that belong to the table."""
    used: list[Result] = []
    runs: dict[str, dict[int, Result]] = {}
    failed: dict[str, list[int]] = {}
    known = {label: job for label, job in jobs().items() if _fits(settings, job)}
    for label, job in known.items():
        for seed in settings.seeds:
            result = find_run(settings, job, seed)
            if result is None:
                continue
            used.append(result)
            if "failed" in result:
                failed.setdefault(label, []).append(seed)
            else:
                runs.setdefault(label, {})[seed] = result
    methods = dict.fromkeys(job.method for job in known.values())
    times = {name: found for name in methods if (found := find_time(settings, name)) is not None}
    probed = {name: found for name in probes() if (found := find_probe(settings, name)) is not None}
    rises = {name: found for name in methods if (found := find_rise(settings, name)) is not None}
    used += [*times.values(), *probed.values(), *rises.values()]
    files = {result["file"] for result in used}
    unused = sorted(path.name for path in settings.results.glob("*.json") if path.name not in files)
    return Results(settings, Evidence(runs, failed, times, probed), used, unused, list(runs), rises)


def _fits(settings: Settings, job: Job) -> bool:
    """Whether the overrides make sense for a job; if not, it cannot have a result."""
    try:
        recipe_of(job, 0, settings)
    except RecipeError:
        return False
    return True
