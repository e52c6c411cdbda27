"""Seconds of an iteration: the forms of a comparison take turns in one process.

The papers compare whole iterations. Their codes compute every state of every sample, also the states that the samples
of a prompt share. Their codes for FLUX also keep no activations for the backward pass, but compute them again, which
makes a state with gradients dearer. So each comparison is timed twice: as the forms run here, also with nothing shared;
and with nothing shared and activations computed again, if the published recipe does so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...configs.load import dump_recipe
from ...configs.schema import Recipe
from ...training.trainer import Trainer
from .forms import FORMS, PAPER_ITERATIONS, UNSHARED, nfe
from .metering import clock_for
from .probes import loaded, probe_code
from .results import Result, Settings, claimed, find, key_of, provenance, write_result
from .trainings import Report

TURNS = 5
"""Places of a run, evenly spread, at which its iterations are timed. A window moves, so a time depends on the place."""
PASSES = 3
"""How often a run is passed through for a verdict. The spread between passes is what a timing does not know."""
APART = ", nothing shared"
AGAIN = "-again"
_MIXED = ("dance_grpo", "dance_grpo_4of25", "mixgrpo", "mixgrpo_flash", "mixgrpo_flash_star")
_TREES = ("dance_grpo_19of20", "dance_grpo_12of20", "branchgrpo", "branchgrpo_depth", "branchgrpo_mix")
FAMILIES: dict[str, tuple[str, ...]] = {
    "mixgrpo": _MIXED, "branchgrpo": _TREES, "mixgrpo" + AGAIN: _MIXED, "branchgrpo" + AGAIN: _TREES
}  # fmt: skip
"""Comparisons by name; the first form is the baseline. With `AGAIN` in its name, forms run as in the papers' codes."""


def timed(settings: Settings, family: str) -> dict[str, Recipe]:
    """The recipes of a comparison by name; a name with `APART` is the form in which samples share nothing.

    The runs have the papers' length, so that a moving window stands where it stands in the paper. In a comparison with
    `AGAIN` in its name, samples share nothing, and activations are computed again where the published recipe says so.
    """
    found = {}
    # Saved samples would count as time of an iteration.
    words = (f"run={{iterations: {PAPER_ITERATIONS}, sample_every: 1000000}}", *settings.overrides)
    for name in FAMILIES[family]:
        form = FORMS[name]
        shares = bool(form.recipe(words).sampler.plan.get("shared_noise"))
        apart = (*words, UNSHARED) if shares else words
        if family.endswith(AGAIN):
            again = f"model.gradient_checkpointing={str(form.paper().model.gradient_checkpointing).lower()}"
            found[name] = form.recipe((*apart, again))
            continue
        found[name] = form.recipe(words)
        if shares:
            found[name + APART] = form.recipe(apart)
    return found


def find_time(settings: Settings, family: str) -> Result | None:
    """The timing of a comparison, or None if there is no result."""
    recipes, same = list(timed(settings, family).values()), {"passes": PASSES} if passes(family) == PASSES else {}
    return find(settings, f"time-{family}", recipes, probe_code(), f"{TURNS} × {passes(family)}", **same)


def passes(family: str) -> int:
    """How often the places are passed through; once for a comparison that no verdict needs."""
    return PASSES if family.endswith(AGAIN) else 1


def measure_times(settings: Settings, families: Sequence[str], report: Report) -> None:
    """Time the comparisons that have no result, except those that another process is timing."""
    for family in families:
        recipes = timed(settings, family)
        file = f"time-{family}-{key_of(list(recipes.values()), probe_code(), f'{TURNS} × {passes(family)}')}"
        with claimed(settings.results / "runs" / f"{file}.lock") as mine, tempfile.TemporaryDirectory() as folder:
            if not mine or find_time(settings, family) is not None:
                continue
            trainers = {name: _warm(recipe, Path(folder) / name) for name, recipe in recipes.items()}
            figures = interleaved(trainers, passes(family))
            figures["nfe"] = {name: asdict(nfe(recipe)) for name, recipe in recipes.items()}
            head = {"kind": "time", "label": family, "recipes": [dump_recipe(recipe) for recipe in recipes.values()]}
            write_result(settings.results / f"{file}.json", head | provenance() | figures)
            first = sum(next(iter(figures["seconds"].values())))
            for name, values in figures["seconds"].items():
                report(
                    f"{name}: {sum(values) / len(values):.2f} s an iteration, {sum(values) / first:.2f} of the first"
                )


def _warm(recipe: Recipe, folder: Path) -> Trainer:
    trainer = loaded(recipe, folder)
    trainer.iterate(0)
    return trainer


def interleaved(trainers: Mapping[str, Trainer], times: int = 1) -> dict[str, Any]:
    """Seconds of `TURNS` iterations of each trainer, in turn, several times; the order is reversed every other turn.

    The iterations are spread evenly over a run of the papers' length, because a window makes early and late iterations
    differ. Loading and the first iteration do not count. On a CPU they are seconds of this process, so that other
    processes of the machine do not count.
    """
    numbers = [int((k + 0.5) * PAPER_ITERATIONS / TURNS) for k in range(TURNS)]
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn, number in enumerate(numbers * times):
        for name in list(trainers)[:: -1 if turn % 2 else 1]:
            now = clock_for(trainers[name].task.device)
            trainers[name].clock.lap()  # waits for an accelerator, like the end of an iteration
            began = now()
            trainers[name].iterate(number)
            seconds[name].append(now() - began)
    return {"iterations": numbers * times, "passes": times, "seconds": seconds}


def shares_of_time(timing: Result, one: str, other: str) -> list[float]:
    """For each pass, the seconds of a form over the whole run divided by the seconds of another form."""
    count = timing.get("passes", 1)
    totals = {}
    for name in (one, other):
        values = timing["seconds"][name]
        size = len(values) // count
        totals[name] = [sum(values[k * size : (k + 1) * size]) for k in range(count)]
    return [a / b for a, b in zip(totals[one], totals[other], strict=True)]
