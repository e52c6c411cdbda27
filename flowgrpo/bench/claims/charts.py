"""The figure of each claim: panels with lines from the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from .evidence import SCORE, Evidence
from .line_charts import Panel, Series
from .results import Result

# Each point of a training curve averages over this share of the run's iterations.
_BIN = 1 / 16
_IN_A_FIGURE = 6
_NAMES = {"gold": "gold, held out", SCORE: "partial gold, held out", "proxy": "proxy, held out"}


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*rows)]


def lines(label: str, by_seed: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[Series]:
    """The mean of a method's seeds, and each seed as a faint line if there are several."""
    if not by_seed:
        return []
    seeds = [Series(label, x, y, faint=True) for x, y in by_seed] if len(by_seed) > 1 else []
    return [*seeds, Series(label, _mean([x for x, _ in by_seed]), _mean([y for _, y in by_seed]))]


def held_out(
    evidence: Evidence,
    labels: Sequence[str],
    axis: str = "iteration",
    name: str = SCORE,
    scale: Mapping[str, float] | None = None,
) -> Panel:
    """A held-out reward against iterations, updates, compute or seconds; `scale` stretches a label's axis."""
    series = []
    for label in labels:
        by_seed = []
        for run in evidence.runs.get(label, {}).values():
            marks = run["evaluation"]
            values = [math.nan if value is None else value for value in marks[name]]
            by_seed.append(([x * (scale or {}).get(label, 1.0) for x in marks[axis]], values))
        series += lines(label, by_seed)
    said = {"iteration": "iterations", "compute": "compute, states through the denoiser"}.get(axis, axis)
    return Panel(_NAMES.get(name, name), said, series)


def overviews(evidence: Evidence, labels: Sequence[str]) -> dict[str, list[Panel]]:
    """Gold (over iterations and compute) and the proxy of all methods; a figure has a few methods and the baselines."""
    baselines = [label for label in ("dance_grpo", "flow_grpo") if label in labels]
    others = [label for label in labels if label not in baselines]
    seen = Evidence({label: _middle(evidence.runs[label]) for label in labels}, {}, {}, {})
    figures = {}
    for first in range(0, len(others), _IN_A_FIGURE):
        shown = [*baselines, *others[first : first + _IN_A_FIGURE]]
        figures[f"all-{first // _IN_A_FIGURE + 1}"] = [
            held_out(seen, shown),
            held_out(seen, shown, "compute"),
            held_out(seen, shown, name="gold"),
            held_out(seen, shown, name="proxy"),
        ]
    return figures


def _middle(runs: Mapping[int, Result]) -> dict[int, Result]:
    """A single result that replaces the results of several seeds: the mean of their evaluations."""
    marks = [run["evaluation"] for run in runs.values()]
    numbers = {name: [[math.nan if v is None else v for v in m[name]] for m in marks] for name in marks[0]}
    return {0: {"evaluation": {name: _mean(rows) for name, rows in numbers.items()}}}


def _against_time(*labels: str) -> Callable[[Evidence], list[Panel]]:
    """The score over iterations, and over time in units of a DanceGRPO iteration."""

    def panels(evidence: Evidence) -> list[Panel]:
        scale = {}
        for label in set(labels) & set(evidence.times):
            seconds = evidence.times[label]["seconds"]
            scale[label] = sum(seconds[label]) / sum(seconds["dance_grpo"])
        timed = held_out(evidence, labels, scale=scale)
        said = "time, in iterations of dance_grpo"
        return [held_out(evidence, labels), Panel(timed.title, said, timed.series)]

    return panels


def _against(axis: str, *labels: str) -> Callable[[Evidence], list[Panel]]:
    return lambda evidence: [held_out(evidence, labels, axis), held_out(evidence, labels, axis, "gold")]


def _gold_and_proxy(*labels: str) -> Callable[[Evidence], list[Panel]]:
    return lambda evidence: [held_out(evidence, labels), held_out(evidence, labels, name="proxy")]


def _by_step(evidence: Evidence) -> list[Panel]:
    figures: dict[str, Callable[[Mapping[str, float]], float]] = {
        "mean log-ratio": lambda s: s["mean"],
        "standard deviation of the log-ratio, log10": lambda s: math.log10(s["var"]) / 2 if s["var"] > 0 else math.nan,
    }
    panels = []
    for title, figure in figures.items():
        series = []
        for label, runs in evidence.runs.items():
            rows = [
                ([float(k) for k in run["steps"]], [figure(s) for s in run["steps"].values()]) for run in runs.values()
            ]
            series += lines(label, rows)
        panels.append(Panel(title, "denoising step", series))
    return panels


def _gradients(evidence: Evidence) -> list[Panel]:
    series = []
    for form, by_seed in evidence.probes["gradient_spread"]["by_step"].items():
        rows = [[value / statistics.fmean(values) for value in values] for values in by_seed]
        series += lines(form, [(list(map(float, range(len(row)))), row) for row in rows])
    return [Panel("gradient in the velocity, over its mean", "denoising step", series)]


def _binned(run: Result, name: str) -> tuple[list[float], list[float]]:
    values = run["curves"][name]
    size = max(round(len(values) * _BIN), 1)
    places, means = [], []
    for first in range(0, len(values), size):
        kept = [value for value in values[first : first + size] if value is not None]
        places.append(first + (len(values[first : first + size]) - 1) / 2)
        means.append(statistics.fmean(kept) if kept else math.nan)
    return places, means


def _signal(evidence: Evidence) -> list[Panel]:
    panels = []
    for name, title in (("degenerate_groups", "share of degenerate groups"), ("grad_norm", "gradient norm")):
        series = []
        for label, runs in evidence.runs.items():
            series += lines(label, [_binned(run, name) for run in runs.values()])
        panels.append(Panel(title, "iterations", series))
    return panels


def _explored(evidence: Evidence) -> list[Panel]:
    panels = []
    for name, title in ((SCORE, "partial gold of rollouts"), ("proxy", "proxy of rollouts")):
        series = []
        for kernel, entries in evidence.probes["exploration"]["kernels"].items():
            seeds = range(len(entries[0]["diversity"]))
            by_seed = [([e["diversity"][k] for e in entries], [e[name][k] for e in entries]) for k in seeds]
            series += lines(kernel, by_seed)
        panels.append(Panel(title, "RMS distance between images of a group", series))
    return panels


def _variances(evidence: Evidence) -> list[Panel]:
    said = {"none": "no baseline", "mean": "mean of the group", "loo": "leave one out"}
    squared = evidence.probes["gradient_variance"]["squared"]
    series = [
        Series(said[name], list(map(float, range(1, len(values) + 1))), sorted(values))
        for name, values in squared.items()
    ]
    return [Panel("squared distance from the mean gradient", "batch, by rising distance", series)]


CHARTS: dict[str, Callable[[Evidence], list[Panel]]] = {
    "mixgrpo": _against_time("dance_grpo", "mixgrpo"),
    "mixgrpo-flash": _against_time("dance_grpo", "mixgrpo_flash_star"),
    "branchgrpo": _against_time("dance_grpo", "branchgrpo_depth"),
    "branchgrpo-mix": _against_time("dance_grpo", "branchgrpo_mix"),
    "tempflow": _against("updates", "flow_grpo", "tempflow_grpo"),
    "guard-ratio": _by_step,
    "guard-reward": _gold_and_proxy("flow_grpo+proxy", "grpo_guard+proxy"),
    "guard-gradient": _gradients,
    "pref-grpo": _gold_and_proxy("pref_grpo+pointwise", "pref_grpo+proxy"),
    "vgpo": _signal,
    "diffusion-nft": _against("compute", "flow_grpo", "diffusion_nft"),
    "sage": _explored,
    "loop": _variances,
}
