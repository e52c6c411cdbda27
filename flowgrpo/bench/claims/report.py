"""The report on the papers' claims: a page and JSON, with verdicts, a figure of all claims, and a figure for each."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...training.folder.run_folder import write_text
from .charts import CHARTS
from .claim_tables import grid, ratios_table, rises_table, runs_table, times_table
from .dots import Dots, draw_dots, verdict_of
from .evidence import SCORE, VERDICTS, Claim, Evidence, Measure, Statement, final, gain
from .intervals import Interval
from .line_charts import draw
from .papers import CLAIMS
from .results import Result, Settings, naming, stamp
from .timings import AGAIN, PASSES, TURNS
from .trainings import DENSE, HELD_OUT, ITERATIONS, TRAINED_ON
from .verdicts import GOLD_MATTERS, GUARDED, MATTERS, NO_LOWER, SLACK

RISE = ("iterations", "images", "before", "after", "error", "failed")
Answer = tuple[Claim, str, Sequence[Statement]]


@dataclass(frozen=True)
class Results:
    """Everything that a report is made from.

    Attributes:
        settings: settings of the table.
        evidence: the results that count.
        used: the same results as a list, for their versions and hardware.
        unused: names of result files that do not count, because their code, settings or seeds differ or they are
            damaged.
        labels: labels of the runs, in order.
        rises: method → the result of its short run.
        embedded: forms of methods without published settings.
    """

    settings: Settings
    evidence: Evidence
    used: Sequence[Result]
    unused: Sequence[str]
    labels: Sequence[str] = field(default=())
    rises: Mapping[str, Result] = field(default_factory=dict)
    embedded: Sequence[str] = field(default=())


def write_report(found: Results, out: Path) -> Path:
    """Write `claims.md`, `claims.json` and `claims/*.svg` into a folder; returns the page."""
    rows = table(found)
    answers: list[Answer] = [(claim, *claim.answer(found.evidence)) for claim in CLAIMS]
    figures = out / "claims"
    figures.mkdir(parents=True, exist_ok=True)
    drawn = {"all": draw_dots(dots(answers))}
    for claim, verdict, _ in answers:
        if verdict != "not measured":
            shared = found.evidence.common(claim.runs) if claim.runs else found.evidence
            drawn[claim.name] = draw(f"{claim.paper}: {verdict}", CHARTS[claim.name](shared))
    for name, text in drawn.items():
        write_text(figures / f"{name}.svg", text)
    data = {
        "command": command(found.settings),
        "package": asdict(stamp()),
        "hardware": machines(found.used),
        "runs": plain(rows),
        "times": {
            name: {key: timed[key] for key in ("iterations", "seconds", "nfe")}
            for name, timed in found.evidence.times.items()
        },
        "rises": {name: {key: run[key] for key in RISE if key in run} for name, run in found.rises.items()},
        "claims": [
            {
                "name": claim.name,
                "paper": claim.paper,
                "statement": claim.statement,
                "verdict": verdict,
                "before": claim.before,
                "findings": [asdict(finding) for finding in findings],
            }
            for claim, verdict, findings in answers
        ],
        "other_code": sorted(r["file"] for r in found.used if r.get("other_code")),
        "unused": list(found.unused),
    }
    text = json.dumps(plain(data), indent=1, allow_nan=False, ensure_ascii=False)
    write_text(out / "claims.json", text + "\n")
    write_text(out / "claims.md", page(found, rows, answers))
    return out / "claims.md"


def dots(answers: Sequence[Answer]) -> list[Dots]:
    """A row for each number that a claim is judged by."""
    return [
        Dots(claim.paper.partition(" ")[0], finding.measure, verdict_of(finding.holds))
        for claim, _, findings in answers
        for finding in findings
        if finding.measure is not None
    ]


def plain(value: Any) -> Any:
    """A value for JSON: intervals become objects, and numbers that are not finite become null."""
    if isinstance(value, Interval):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def command(settings: Settings) -> str:
    """The command line that makes this report."""
    words = ["flowgrpo", "bench", "claims", *settings.overrides, "--seeds", ",".join(map(str, settings.seeds))]
    words += ["--scale", f"{settings.scale:g}", "--budget", f"{settings.budget:g}", *naming(settings, "claims")]
    return shlex.join(words + ["--any-code"] * settings.any_code)


def machines(results: Iterable[Result]) -> list[str]:
    """The hardware of the results, each kind once."""
    found: dict[str, None] = {}
    for result in results:
        h = result["hardware"]
        where = h["gpu"] or f"{h['threads']} thread(s) on {h['cores']} cores of {h['cpu']}"
        found[f"{where}, torch {h['torch']}"] = None
    return list(found)


def origins(results: Sequence[Result]) -> list[str]:
    """What a reader must know of where results come from: other code, or several machines; nothing if neither."""
    said = []
    others = sorted({r["label"] for r in results if r.get("other_code")})
    if others:
        said.append(f"These results come from other code, with an equal recipe: {', '.join(others)}.")
    if len(machines(results)) > 1:
        said.append("Results come from more than one machine or number of threads: compare ratios, not seconds.")
    return said


# -- the runs ----------------------------------------------------------------------------------------------------------


def table(found: Results) -> dict[str, dict[str, Any]]:
    """Label → column → a number or an interval."""
    evidence, rows = found.evidence, {}
    for label in found.labels:
        own = evidence.runs[label]
        first = next(iter(own.values()))
        row: dict[str, Any] = {"seeds": sorted(own), "failed": list(evidence.failed.get(label, ()))}
        row |= {"iterations": first["iterations"], "images": first["images"], "trained_on": first["trained_on"]}
        for name in ("compute", "seconds"):
            row[name] = statistics.fmean(run["totals"].get(name, 0) / run["iterations"] for run in own.values())
        for name in (SCORE, DENSE, "proxy"):
            row[name] = Interval.of(final(run, name) for run in own.values())
            row[f"{name}_gain"] = Interval.of(gain(run, name) for run in own.values())
        rows[label] = row
    return rows


# -- the page ----------------------------------------------------------------------------------------------------------


def page(found: Results, rows: Mapping[str, Mapping[str, Any]], answers: Sequence[Answer]) -> str:
    """The whole page as Markdown."""
    assert {verdict for _, verdict, _ in answers} <= set(VERDICTS)
    parts = [
        "# The papers' claims, measured at the papers' own settings",
        "![Each claim: what the paper says and what was measured](claims/all.svg)",
        grid(
            ["paper", "claim of the paper", "measured here", "verdict", "before"],
            [
                [_linked(c), c.statement, "<br>".join(_numbers(findings)) or "–", f"**{verdict}**", c.before or "–"]
                for c, verdict, findings in answers
            ],
        ),
        "“Before” is the verdict of the previous page. It compared the recipes in the proportions of the embedded "
        "model, with another baseline than some papers have.",
        "## How it is measured",
        *_how(found),
        *_warnings(found),
    ]
    for claim, verdict, findings in answers:
        parts += [f"## {claim.paper}: {claim.name}", f"{claim.statement} **{verdict.capitalize()}.**"]
        parts.append("\n".join(f"- {finding.text}{_mark(finding)}" for finding in findings))
        if claim.name == "guard-ratio" and verdict != "not measured":
            parts.append(ratios_table(found.evidence, GUARDED))
        if verdict != "not measured":
            parts.append(f"![{claim.paper}: {claim.name}](claims/{claim.name}.svg)")
    for name, timed in found.evidence.times.items():
        ran = "as in the papers' codes" if name.endswith(AGAIN) else "as the forms run here"
        parts += [f"## Seconds of an iteration: {name.removesuffix(AGAIN)}, {ran}", times_table(timed)]
    if rows:
        parts += ["## The runs", runs_table(rows)]
    if found.rises:
        parts += ["## Every recipe raises its reward", *rises_table(found.rises)]
    return "\n\n".join(parts) + "\n"


def _numbers(findings: Sequence[Statement]) -> list[str]:
    """The numbers that a claim is judged by, with the paper's numbers."""
    said = []
    for finding in findings:
        if (measure := finding.measure) is not None:
            claimed = "" if measure.claimed is None else f"; claimed {measure.claimed:.2f}"
            rule = f"holds if {'≥' if measure.least else '≤'} {_bound(measure.bound)}"
            rule += f", {_refuting(measure)}" if measure.beyond and not finding.holds else ""
            shown = measure.text(".2f" if abs(measure.interval.mean) >= 0.1 else ".3f")
            said.append(f"{measure.words}: {shown} ({rule}{claimed})")
    return said


def _refuting(measure: Measure) -> str:
    return f"refuted if {'<' if measure.least else '>'} {_bound(measure.refuting)}"


def _bound(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def _how(found: Results) -> list[str]:
    settings = found.settings
    embedded = (
        f" These have no published settings and run as they are embedded: {', '.join(found.embedded)}."
        if found.embedded
        else ""
    )
    return [
        f"`{command(settings)}`",
        f"Run on: {'; '.join(machines(found.used)) or 'nothing yet'}. "
        f"Package {stamp().version}, code {stamp().code}, model and prompts {stamp().data}. {_spent(found)}",
        "Each method has the proportions of its paper: its steps, window, tree, group, objective, advantages, updates "
        "and averages. The model, the learning rate and the prompts come from the embedded world. An iteration has "
        f"an eighth of the paper's prompts.{embedded} Runs have {ITERATIONS} × {settings.scale:g} iterations; runs on "
        "the proxy are longer.",
        f"Runs train on the reward `{TRAINED_ON}`, unless a claim is about another reward. It is smooth: it compares "
        "the area of each colour in a picture with the area that the prompt asks for, in [0, 1]. It asks for twice the "
        "usual area, so that the model starts far below the best score. It says nothing about shapes and relations, so "
        f"partial gold may fall while it rises. All figures are of the prompts `{HELD_OUT}`, from the same noise for "
        "all runs. Nothing was chosen on these prompts.",
        "A share of time is of whole iterations that take turns in one process, in processor seconds on a CPU. As in "
        "the papers' codes, no states are shared and activations are computed again for the backward pass; the shares "
        "without these two are beside it. (That activations are computed again was decided after a first, noisy "
        "timing, because the published recipes do so.) Each verdict has the mean share of "
        f"{PASSES} passes through a run, at {TURNS} places each. (A first timing took the places for repeats. But a "
        "window moves, so the share changes from place to place, and this change is no error.) NFE are evaluations of "
        "the denoiser for an image, by the policy that samples and by the policy that is trained.",
        "A number has a 95 % interval of Student's t, over seeds, passes of a timing, or draws of a probe. A method "
        "and its baseline are compared seed by seed. Bounds were set before measuring: a share of time may exceed the "
        f"paper's by {SLACK:.2f}; a reward is no lower if the gain is at least {NO_LOWER:g} of the baseline's gain; a "
        f"higher reward is a larger gain, and is refuted if the gain is less than {1 + MATTERS:g} of the baseline's; a "
        f"difference of partial gold below {GOLD_MATTERS:g} does not matter, and refutes a claim of a difference. "
        "A claim is *reproduced* if every interval lies on its side of the bound, *not reproduced* if one lies beyond, "
        "and else *undecided*. Seeds are added until a claim is decided or the time is spent. So an interval that "
        "decides a claim only just is weaker evidence than its 95 % say.",
    ]


def _linked(claim: Claim) -> str:
    heading = f"{claim.paper}: {claim.name}".lower()
    return f"[{claim.paper}](#{''.join(c for c in heading if c.isalnum() or c in ' -').replace(' ', '-')})"


def _mark(finding: Statement) -> str:
    if finding.note:
        return ""
    measure = finding.measure
    if finding.holds is not None:
        rule = f"; {_refuting(measure)}" if measure is not None and measure.beyond else ""
        return " *Holds.*" if finding.holds else f" *Does not hold{rule}.*"
    if measure is None:
        return " *Undecided.*"
    if measure.takes:
        return f" *Undecided; {measure.takes}.*"
    if measure.interval.count == 1:
        return " *Undecided; one value decides nothing.*"
    if measure.more is None:
        return f" *Undecided; by the present spread, no number of {measure.each} that can be made decides it.*"
    return f" *Undecided; by the present spread, about {measure.more} more {measure.each} decide it.*"


def _spent(found: Results) -> str:
    runs = [run for label in found.labels for run in found.evidence.runs[label].values()]
    minutes = sum(run["totals"].get("seconds", 0.0) for run in runs) / 60
    return f"The {len(runs)} runs trained for {minutes:.0f} minutes in all; evaluations are not counted."


def _warnings(found: Results) -> list[str]:
    said = origins(found.used)
    broken = [f"{label} (seed {', '.join(map(str, s))})" for label, s in found.evidence.failed.items() if s]
    if broken:
        said.append(f"These runs ended early, with a gradient that was not finite: {'; '.join(broken)}.")
    if found.unused:
        said.append(
            f"{len(found.unused)} result files are damaged or of other code, settings or seeds, and are not used; "
            "claims.json lists them."
        )
    return said
