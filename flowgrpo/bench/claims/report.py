"""The report on the papers' claims: one table as Markdown and JSON, verdicts, and a figure for each claim."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...training.folder.run_folder import write_text
from .charts import CHARTS, overviews
from .evidence import SCORE, VERDICTS, Evidence, Interval, Statement, final, gain, score_at, time_ratio
from .line_charts import draw
from .results import Result, Settings, stamp
from .trainings import GRADIENT_UNITS, ITERATIONS
from .verdicts import CLAIMS, GUARDED

RISE = ("iterations", "images", "before", "after", "error", "failed")


@dataclass(frozen=True)
class Results:
    """Everything that a report is made from.

    Attributes:
        settings: settings of the table.
        evidence: the results that count.
        used: the same results as a list, for their versions and hardware.
        unused: names of result files that do not count, because their code, settings or seeds differ.
        labels: labels of the table's rows, in order.
        rises: method → the result of its short run.
    """

    settings: Settings
    evidence: Evidence
    used: Sequence[Result]
    unused: Sequence[str]
    labels: Sequence[str] = field(default=())
    rises: Mapping[str, Result] = field(default_factory=dict)


def write_report(found: Results, out: Path) -> Path:
    """Write `claims.md`, `claims.json` and `claims/*.svg` into a folder; returns the page."""
    rows = table(found)
    answers = [(claim, *claim.answer(found.evidence)) for claim in CLAIMS]
    figures = out / "claims"
    figures.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for claim, verdict, _ in answers:
        if verdict != "not measured":
            shared = found.evidence.common(claim.runs) if claim.runs else found.evidence
            drawn[claim.name] = draw(f"{claim.paper}: {verdict}", CHARTS[claim.name](shared))
    every = overviews(found.evidence, found.labels)
    drawn |= {name: draw("Held-out rewards, means of the seeds", panels) for name, panels in every.items()}
    for name, text in drawn.items():
        write_text(figures / f"{name}.svg", text)
    data = {
        "command": command(found.settings),
        "package": asdict(stamp()),
        "hardware": machines(found.used),
        "methods": plain(rows),
        "rises": {name: {key: run[key] for key in RISE if key in run} for name, run in found.rises.items()},
        "claims": [
            {
                "name": claim.name,
                "paper": claim.paper,
                "statement": claim.statement,
                "verdict": verdict,
                "findings": [asdict(finding) for finding in findings],
            }
            for claim, verdict, findings in answers
        ],
        "other_code": sorted(r["file"] for r in found.used if r.get("other_code")),
        "unused": list(found.unused),
    }
    write_text(out / "claims.json", json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    write_text(out / "claims.md", page(found, rows, [(c.name, c.paper, c.statement, v, f) for c, v, f in answers]))
    return out / "claims.md"


def plain(value: Any) -> Any:
    """A value for JSON: intervals become objects, and numbers that are not finite become null."""
    if isinstance(value, Interval):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def command(settings: Settings) -> str:
    """The command line that makes this report."""
    words = ["flowgrpo", "bench", "claims", *settings.overrides, "--seeds", ",".join(map(str, settings.seeds))]
    words += ["--scale", f"{settings.scale:g}", *(["--any-code"] if settings.any_code else [])]
    return shlex.join(words)


def machines(results: Iterable[Result]) -> list[str]:
    """The hardware of the results, each kind once."""
    found: dict[str, None] = {}
    for result in results:
        h = result["hardware"]
        where = h["gpu"] or f"{h['threads']} thread(s) on {h['cores']} cores of {h['cpu']}"
        found[f"{where}, torch {h['torch']}"] = None
    return list(found)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(found: Results) -> dict[str, dict[str, Any]]:
    """Label → column → a number or an interval; None if it was not measured."""
    evidence = found.evidence
    runs = [run for label in found.labels for run in evidence.runs[label].values()]
    budget = min((run["evaluation"]["compute"][-1] for run in runs), default=0.0)

    def afforded(run: Result) -> float:
        return score_at(run, "compute", budget)

    rows = {}
    for label in found.labels:
        own = evidence.runs[label]
        first = next(iter(own.values()))
        row: dict[str, Any] = {"seeds": sorted(own), "failed": list(evidence.failed.get(label, ()))}
        row |= {"iterations": first["iterations"], "images": first["images"], "trained_on": first["trained_on"]}
        for name in ("evaluations", "trained_edges", "trained_states", "compute", "seconds"):
            row[name] = _mean(run["totals"].get(name, 0) / run["iterations"] for run in own.values())
        for baseline in ("dance_grpo", "flow_grpo"):
            timed = baseline in evidence.times.get(label, {}).get("seconds", {})
            row[f"time_{baseline}"] = time_ratio(evidence, label, baseline) if timed else None
        for name in ("gold", SCORE, "proxy", "diversity"):
            row[name] = Interval.of(final(run, name) for run in own.values())
            row[f"{name}_gain"] = Interval.of(gain(run, name) for run in own.values())
        row["over_flow_grpo"] = _over(evidence, label, "flow_grpo", final)
        row["at_equal_compute"] = Interval.of(map(afforded, own.values()))
        row["over_default_there"] = _over(evidence, label, "default", afforded)
        row["budget"] = budget
        rows[label] = row | _statistics(own.values())
    return rows


def _over(evidence: Evidence, label: str, baseline: str, figure: Callable[[Result], float]) -> Interval | None:
    shared = evidence.common((label, baseline))
    return shared.difference(label, baseline, figure) if shared.runs and label != baseline else None


def _statistics(runs: Iterable[Result]) -> dict[str, float | None]:
    """Statistics of ratio and gradient over the iterations of a run, averaged over the seeds."""
    curves = [run["curves"] for run in runs]

    def over(name: str, figure: Callable[[list[float]], float]) -> float | None:
        kept = [[v for v in c.get(name, ()) if v is not None] for c in curves]
        return _mean(figure(values) for values in kept if values)

    return {
        "first_error": over("ratio/first_error", max),
        "ratio": over("ratio/mean", statistics.fmean),
        "log_ratio_rms": over("log_ratio_sq", lambda values: math.sqrt(statistics.fmean(values))),
        "clip_share": over("clip_share", statistics.fmean),
        "degenerate_groups": over("degenerate_groups", statistics.fmean),
        "grad_norm": over("grad_norm", statistics.fmean),
        "grad_variation": over("grad_norm", lambda v: statistics.pstdev(v) / statistics.fmean(v) if any(v) else 0.0),
    }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


# -- the page ----------------------------------------------------------------------------------------------------------

Answer = tuple[str, str, str, str, Sequence[Statement]]


def page(found: Results, rows: Mapping[str, Mapping[str, Any]], answers: Sequence[Answer]) -> str:
    """The whole page as Markdown."""
    settings = found.settings
    parts = [
        "# The papers' claims, on the embedded default",
        f"`{command(settings)}`",
        f"Run on: {'; '.join(machines(found.used)) or 'nothing yet'}. "
        f"Package {stamp().version}, code {stamp().code}, model and prompts {stamp().data}.",
        "Every method trains by its recipe, most of them not tuned to this model, on the same seeds for "
        f"{ITERATIONS} × {settings.scale:g} iterations. All are evaluated on the same held-out prompts from the same "
        "noise. Numbers are means over seeds with 95 % intervals of Student's t; methods are compared by their "
        "difference on each seed. A claim rests on one or more intervals. It is *reproduced* if all of them lie on its "
        "side of the bound, *not reproduced* if one lies beyond the bound, and else *undecided*.",
        _spent(found),
        *_warnings(found),
        "## Verdicts",
        _grid(
            ["paper", "claim", "verdict"],
            [[_linked(name, paper), text, f"**{v}**"] for name, paper, text, v, _ in answers],
        ),
    ]
    assert {verdict for *_, verdict, _ in answers} <= set(VERDICTS)
    for name, paper, statement, verdict, findings in answers:
        parts += [f"## {paper}: {name}", f"{statement} **{verdict.capitalize()}.**"]
        parts.append("\n".join(f"- {finding.text}{_mark(finding)}" for finding in findings))
        if name == "guard-ratio" and verdict != "not measured":
            parts.append(_by_step(found.evidence, GUARDED))
        if verdict != "not measured":
            parts.append(f"![{paper}: {name}](claims/{name}.svg)")
    if rows:
        every = overviews(found.evidence, found.labels)
        parts += ["## All methods", *_tables(rows), *(f"![Held-out rewards, {k}](claims/{k}.svg)" for k in every)]
    if found.rises:
        parts += ["## Every recipe raises its reward", *_rises(found.rises)]
    return "\n\n".join(parts) + "\n"


def _rises(rises: Mapping[str, Result]) -> list[str]:
    head = ["method", "iterations", "before", "after", "change", "standard errors"]
    rows = []
    for name, run in rises.items():
        if "failed" in run:
            rows.append([name, "–", "–", "–", run["failed"], "–"])
            continue
        change = run["after"] - run["before"]
        shown = [f"{run['before']:.3f}", f"{run['after']:.3f}", f"{change:+.3f} ± {run['error']:.3f}"]
        cells = [name, str(run["iterations"]), *shown, f"{-change / run['error']:.1f}" if run["error"] else "–"]
        rows.append([cell.replace("-", "−") if k else cell for k, cell in enumerate(cells)])
    images = next((run["images"] for run in rises.values() if "images" in run), 0)
    return [
        "Each recipe is run for a few iterations on seed 0, with small JPEG files as its reward (Pref-GRPO: as the "
        f"judge of its win rates). The table has the kilobytes of {images} held-out images, one for each prompt, "
        "before and after. The standard error is the error of the mean difference of pairs with the same prompt and "
        "noise.",
        _grid(head, rows),
    ]


def _by_step(evidence: Evidence, labels: Sequence[str]) -> str:
    """Table by step: mean ± deviation of the log-ratio, and the share clipped, averaged over the seeds."""
    steps = sorted({int(k) for label in labels for run in evidence.runs[label].values() for k in run["steps"]})
    rows = []
    for step in steps:
        row = [str(step)]
        for label in labels:
            stats = [run["steps"][str(step)] for run in evidence.runs[label].values() if str(step) in run["steps"]]
            mean, spread = _mean(s["mean"] for s in stats), _mean(math.sqrt(s["var"]) for s in stats)
            clipped = _mean(s["clipped"] for s in stats)
            shown = "–" if mean is None else f"{mean:.1e} ± {spread:.1e}"
            row += [shown.replace("-", "−"), "–" if clipped is None else f"{clipped:.1%}"]
        rows.append(row)
    return _grid(["step", *(text for label in labels for text in (f"log-ratio, {label}", "clipped"))], rows)


def _linked(name: str, paper: str) -> str:
    anchor = "".join(c for c in f"{paper}: {name}".lower() if c.isalnum() or c in " -").replace(" ", "-")
    return f"[{paper}](#{anchor})"


def _mark(finding: Statement) -> str:
    if finding.note:
        return ""
    return {True: " *Holds.*", False: " *Does not hold.*", None: " *Undecided.*"}[finding.holds]


def _spent(found: Results) -> str:
    runs = [run for label in found.labels for run in found.evidence.runs[label].values()]
    hours = sum(run["totals"].get("seconds", 0.0) for run in runs) / 3600
    return f"The {len(runs)} runs trained for {hours:.1f} hours in all; evaluations are not counted."


def _warnings(found: Results) -> list[str]:
    said = []
    others = sorted({r["label"] for r in found.used if r.get("other_code")})
    if others:
        said.append(f"These results come from other code, with an equal recipe: {', '.join(others)}.")
    if len(machines(found.used)) > 1:
        said.append("Results come from more than one machine or number of threads: compare ratios, not seconds.")
    broken = [f"{label} (seed {', '.join(map(str, s))})" for label, s in found.evidence.failed.items() if s]
    if broken:
        said.append(f"These runs ended early, with a gradient that was not finite: {'; '.join(broken)}.")
    if found.unused:
        said.append(
            f"{len(found.unused)} result files of other code, settings or seeds are not used; claims.json lists them."
        )
    return said


def _tables(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    budget = next(iter(rows.values()))["budget"]
    cost = [
        ("seeds", lambda r: ", ".join(map(str, r["seeds"]))), ("iterations", lambda r: str(r["iterations"])),
        ("images", lambda r: str(r["images"])), ("rollout evaluations", _number("evaluations", ".0f")),
        ("trained edges", _number("trained_edges", ".0f")), ("states with gradient", _number("trained_states", ".0f")),
        ("compute", _number("compute", ".0f")), ("seconds", _number("seconds", ".2f")),
        ("of dance_grpo's", _number("time_dance_grpo", ".2f")), ("of flow_grpo's", _number("time_flow_grpo", ".2f")),
    ]  # fmt: skip
    reward = [
        ("trained on", lambda r: r["trained_on"]), ("gold", _number("gold", ".3f")),
        ("partial gold", _number(SCORE, ".3f")), ("gain", _number(f"{SCORE}_gain", "+.3f")),
        ("over flow_grpo", _number("over_flow_grpo", "+.3f")),
        (f"at {budget:.0f} units", _number("at_equal_compute", ".3f")),
        ("over default there", _number("over_default_there", "+.3f")),
        ("proxy", _number("proxy", ".3f")), ("proxy gain", _number("proxy_gain", "+.4f")),
        ("diversity", _number("diversity", ".4f")), ("change", _number("diversity_gain", "+.4f")),
    ]  # fmt: skip
    ratio = [
        ("first error", _number("first_error", ".1e")), ("ratio", _number("ratio", ".6f")),
        ("log-ratio RMS", _number("log_ratio_rms", ".1e")), ("clipped", _number("clip_share", ".1%")),
        ("degenerate groups", _number("degenerate_groups", ".1%")), ("gradient norm", _number("grad_norm", ".2e")),
        ("its variation", _number("grad_variation", ".2f")),
    ]  # fmt: skip
    return [
        "### Cost of an iteration",
        "Trained edges are the edges of the plan, before any selection; losses of the forward process have none. "
        "Compute is the number of states through the denoiser in rollout and update; a state with gradients counts "
        f"{GRADIENT_UNITS}. Seconds were taken in the runs, while other processes ran as well; for their ratios, the "
        "methods were timed in turn in one process.",
        _rows(cost, rows),
        "### Held-out rewards and diversity",
        f"Gold is the share of satisfied prompts, and partial gold ({SCORE}) is their partial credit. Diversity is the "
        "RMS distance between two images of a prompt, with pixels in [0, 1]. The column of partial gold at "
        f"{budget:.0f} units compares the methods at equal compute, as much as the cheapest method spends in all; "
        "values between two evaluations are interpolated.",
        _rows(reward, rows),
        "### Ratio and gradient",
        "The first error is the largest distance of the ratio from 1 before an update. Log-ratios are means over a "
        "latent.",
        _rows(ratio, rows),
    ]


def _number(name: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    def shown(row: Mapping[str, Any]) -> str:
        value = row[name]
        if value is None:
            return "–"
        return value.text(form) if isinstance(value, Interval) else f"{value:{form}}".replace("-", "−")

    return shown


def _rows(
    columns: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]], rows: Mapping[str, Mapping[str, Any]]
) -> str:
    cells = [[label, *(shown(row) for _, shown in columns)] for label, row in rows.items()]
    return _grid(["method", *(name for name, _ in columns)], cells)


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
