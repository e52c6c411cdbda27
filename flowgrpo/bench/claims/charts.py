"""The figure of each claim: panels with lines from the results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from .evidence import SCORE, Evidence
from .line_charts import Panel, Series
from .timings import AGAIN
from .trainings import DENSE

_NAMES = {SCORE: "paint, test prompts", DENSE: "partial gold, test prompts", "proxy": "proxy, test prompts"}


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


def _against_time(family: str, *labels: str) -> Callable[[Evidence], list[Panel]]:
    """The score over iterations, and over time in units of an iteration of the first label."""

    def panels(evidence: Evidence) -> list[Panel]:
        seconds = evidence.times[family + AGAIN]["seconds"]
        own = {label: sum(seconds[label]) for label in labels}
        timed = held_out(evidence, labels, scale={label: own[label] / own[labels[0]] for label in labels})
        return [
            held_out(evidence, labels),
            Panel(timed.title, f"time, in iterations of {labels[0]}", timed.series),
            held_out(evidence, labels, name=DENSE),
        ]

    return panels


def _against(axis: str, *labels: str) -> Callable[[Evidence], list[Panel]]:
    return lambda evidence: [held_out(evidence, labels, axis), held_out(evidence, labels, axis, DENSE)]


def _gold_and_proxy(*labels: str) -> Callable[[Evidence], list[Panel]]:
    return lambda evidence: [held_out(evidence, labels, name=DENSE), held_out(evidence, labels, name="proxy")]


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


def _vanished(evidence: Evidence) -> list[Panel]:
    probe = evidence.probes["vanishing"]
    places = [
        math.log10(factor) if factor else math.log10(min(f for f in probe["shrunk"] if f)) - 1
        for factor in probe["shrunk"]
    ]
    said = {"value": "VGPO", "relative": "advantages of the group alone"}
    series = []
    for name, words in said.items():
        series += lines(words, [(places, [norm / norms[0] for norm in norms]) for norms in probe[name]])
    return [Panel("gradient norm, of its norm at first", "differences within groups, log10 (leftmost: none)", series)]


def _explored(evidence: Evidence) -> list[Panel]:
    panels = []
    for name, title in ((DENSE, "partial gold of rollouts"), ("proxy", "proxy of rollouts")):
        series = []
        for kernel, entries in evidence.probes["exploration"]["kernels"].items():
            seeds = range(len(entries[0]["diversity"]))
            by_seed = [([e["diversity"][k] for e in entries], [e[name][k] for e in entries]) for k in seeds]
            series += [Series(kernel, _mean([x for x, _ in by_seed]), _mean([y for _, y in by_seed]))]
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
    "mixgrpo": _against_time("mixgrpo", "dance_grpo", "mixgrpo"),
    "mixgrpo-flash": _against_time("mixgrpo", "dance_grpo", "mixgrpo_flash_star", "mixgrpo_flash"),
    "branchgrpo": _against_time("branchgrpo", "dance_grpo_19of20", "branchgrpo_depth"),
    "branchgrpo-mix": _against_time("branchgrpo", "dance_grpo_19of20", "branchgrpo_mix"),
    "tempflow": _against("updates", "flow_grpo", "tempflow_grpo"),
    "guard-ratio": _by_step,
    "guard-reward": _gold_and_proxy("flow_grpo+proxy", "grpo_guard+proxy"),
    "guard-gradient": _gradients,
    "pref-grpo": _gold_and_proxy("pref_grpo+pointwise", "pref_grpo+proxy"),
    "vgpo": _vanished,
    "diffusion-nft": _against("compute", "flow_grpo", "diffusion_nft"),
    "sage": _explored,
    "loop": _variances,
}
