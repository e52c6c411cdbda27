"""Whether a recipe raises the reward it trains on, by a run so short that every recipe can be tried.

Partial gold, which the methods are compared by, rises slowly: over the common length most gains are within what the
held-out prompts can tell. The size of a JPEG file needs no interpretation, differs among any two images and can be
lowered at once, so a recipe that fails to lower it does not optimise.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...configs.load import dump_recipe
from ...configs.schema import Recipe
from ...training.session import start
from ..measures import Silent
from .results import Result, Settings, claimed, find, key_of, provenance, write_result
from .trainings import Job, Report, json_lines, recipe_of

# The warm-up of a critic, ten iterations, leaves room for some that train the policy.
ITERATIONS = 16
# In kilobytes; the reward itself is over 500.
FILES = "{name: jpeg_compressibility, weight: 500}"
WIN_RATE = "{name: win_rate, options: {judge: jpeg_compressibility}}"


def find_rise(settings: Settings, method: str) -> Result | None:
    """The short run of a method, if it is there."""
    return find(settings, f"{method}-rise", [rise_recipe(settings, method)])


def rise_recipe(settings: Settings, method: str) -> Recipe:
    """A method's recipe with small files as its reward, or as what its win rates are of, on seed 0."""
    own = recipe_of(Job(method, method), 0, settings)
    rewards = WIN_RATE if any(entry.name == "win_rate" for entry in own.rewards) else FILES
    iterations = max(1, round(ITERATIONS * settings.scale))
    changes = (
        f"rewards=[{rewards}]",
        f"evaluate={{every: {iterations}, seeds: 1, steps: 10, rewards: [{FILES}]}}",
        f"run={{iterations: {iterations}, seed: 0, checkpoint_every: {iterations}, sample_every: {iterations}}}",
    )
    return recipe_of(Job(method, method, changes), 0, settings)


def measure_rises(settings: Settings, methods: Sequence[str], report: Report) -> None:
    """Make the short runs that are missing, but for those that another process is at.

    A gradient that is not finite ends a run; that is its result.
    """
    for method in methods:
        recipe = rise_recipe(settings, method)
        file = f"{method}-rise-{key_of([recipe])}"
        with claimed(settings.results / "runs" / f"{file}.lock") as mine:
            if not mine or find_rise(settings, method) is not None:
                continue
            head = {"kind": "rise", "label": method, "recipes": [dump_recipe(recipe)]}
            try:
                figures = _rise(recipe)
                report(
                    f"{method}: {figures['before']:.3f} → {figures['after']:.3f} kilobytes after "
                    f"{recipe.run.iterations} iterations, standard error {figures['error']:.3f}"
                )
            except FloatingPointError as error:
                figures = {"failed": str(error)}
                report(f"{method}: {error}")
            write_result(settings.results / f"{file}.json", head | provenance() | figures)


def _rise(recipe: Recipe) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        start(recipe, run).trainer(Silent()).train()
        return paired(run / "samples", recipe.run.iterations)


def paired(samples: Path, iterations: int) -> dict[str, Any]:
    """Kilobytes of the held-out images before and after, and the standard error of the mean of their differences.

    Args:
        samples: folder of a run's samples, those of its evaluations before and after among them.
        iterations: of the run.
    """
    kilobytes: dict[int, dict[tuple[int, int], float]] = {0: {}, iterations: {}}
    for record in json_lines(samples / "index.jsonl"):
        if record["phase"] == "eval" and record["iteration"] in kilobytes:
            found = -500 * record["rewards"]["jpeg_compressibility"]
            kilobytes[record["iteration"]][record["prompt_id"], record["seed"]] = found
    before, after = kilobytes[0], kilobytes[iterations]
    differences = [after[image] - size for image, size in before.items()]
    return {
        "iterations": iterations,
        "images": len(differences),
        "before": statistics.fmean(before.values()),
        "after": statistics.fmean(after.values()),
        "error": statistics.stdev(differences) / math.sqrt(len(differences)),
    }
