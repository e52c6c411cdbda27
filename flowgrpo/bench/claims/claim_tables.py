"""The tables of the report on the papers' claims, as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...configs.load import load_image_recipe, recipe_names
from ...parts.traits import trained
from .evidence import SCORE, Evidence
from .intervals import Interval
from .results import Result
from .timings import APART, shares_of_time
from .trainings import DENSE, GRADIENT_UNITS


def times_table(timed: Result) -> str:
    """Evaluations and seconds of each form of a comparison."""
    seconds = timed["seconds"]
    first = next(iter(seconds))
    rows = []
    for name, values in seconds.items():
        nfe = timed["nfe"][name]
        shown = f"({nfe['old']:.3g}, {nfe['theta']:.3g})"
        here = f"({nfe['old_shared']:.3g}, {nfe['theta_shared']:.3g})"
        share = Interval.of(shares_of_time(timed, name, first + APART if name.endswith(APART) else first))
        text = share.text(".2f") if share.count > 1 else f"{share.mean:.2f}"
        rows.append([name, shown, here, f"{statistics.fmean(values):.2f}", text])
    return grid(["form", "NFE (old, θ)", "computed here", "seconds", f"share of {first}"], rows)


def runs_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """What each run spent and gained, after a sentence on the columns."""
    head = ["run", "seeds", "iterations", "images", "trained on", "compute", "seconds", "paint", "gain", "partial gold"]
    cells = []
    for label, row in rows.items():
        own = [label, ", ".join(map(str, row["seeds"])), str(row["iterations"]), str(row["images"]), row["trained_on"]]
        own += [f"{row['compute']:.0f}", f"{row['seconds']:.1f}"]
        own += [row[SCORE].text(".3f"), row[f"{SCORE}_gain"].text(), row[f"{DENSE}_gain"].text()]
        cells.append(own)
    said = (
        "Compute and seconds are of an iteration. Compute is the number of states through the denoiser; a state with "
        f"gradients counts {GRADIENT_UNITS}. Partial gold is its change over the run."
    )
    return f"{said}\n\n{grid(head, cells)}"


NO_RISE = {
    "states": "no reward enters their loss",
    "gradients": "the size of a JPEG file has no gradient",
    "targets": "the size of a JPEG file has no gradient",
    "recovered": "the size of a JPEG file has no gradient",
}
"""What a recipe trains that has no short run with small JPEG files as its reward, and why."""


def rises_table(rises: Mapping[str, Result]) -> list[str]:
    """A paragraph on the short runs, and the kilobytes of each recipe before and after."""
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
    kinds = {name: trained(load_image_recipe(name)) for name in recipe_names("images")}
    apart = {
        why: [name for name, kind in kinds.items() if NO_RISE.get(kind) == why]
        for why in dict.fromkeys(NO_RISE.values())
    }
    missing = ", ".join(sorted(set(kinds) - set(rises) - {name for names in apart.values() for name in names}))
    return [
        "Each recipe is run for a few iterations on seed 0, with small JPEG files as its reward (Pref-GRPO: as the "
        f"judge of its win rates). The table has the kilobytes of {images} held-out images, one for each prompt, "
        "before and after. The standard error is the error of the mean difference of pairs with the same prompt and "
        "noise.",
        *([f"Not measured with their present settings: {missing}."] if missing else []),
        *(f"No such run, because {why}: {', '.join(names)}." for why, names in apart.items() if names),
        grid(head, rows),
    ]


def ratios_table(evidence: Evidence, labels: Sequence[str]) -> str:
    """Table by step: mean ± deviation of the log-ratio, and the share clipped, averaged over the seeds."""
    steps = sorted({int(k) for label in labels for run in evidence.runs[label].values() for k in run["steps"]})
    rows = []
    for step in steps:
        row = [str(step)]
        for label in labels:
            stats = [run["steps"][str(step)] for run in evidence.runs[label].values() if str(step) in run["steps"]]
            mean, spread = _average(s["mean"] for s in stats), _average(math.sqrt(s["var"]) for s in stats)
            clipped = _average(s["clipped"] for s in stats)
            shown = "–" if mean is None else f"{mean:.1e} ± {spread:.1e}"
            row += [shown.replace("-", "−"), "–" if clipped is None else f"{clipped:.1%}"]
        rows.append(row)
    return grid(["step", *(text for label in labels for text in (f"log-ratio, {label}", "clipped"))], rows)


def _average(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
