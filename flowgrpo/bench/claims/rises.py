"""Tests whether a recipe raises the reward that it trains on, with runs that are short enough for every recipe.

The methods are compared by partial gold, which rises slowly: over the common length, most gains are too small for the
number of held-out prompts. The size of a JPEG file needs no interpretation, differs between any two images, and can be
lowered at once. So a recipe that fails to lower it does not optimise.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...configs.load import dump_recipe, load_image_recipe
from ...configs.schema import Recipe
from ...parts.choice import plain
from ...training.recipe_prompts import read_heldout
from ...training.session import start
from ..measures import Silent
from .results import Result, Settings, claimed, find, key_of, provenance, write_result
from .trainings import Report, json_lines

# A critic warms up for ten iterations, so some iterations remain that train the policy.
ITERATIONS = 16
FEWEST_PROMPTS = 2
# In kilobytes; the reward itself is over 500.
FILES = "{name: jpeg_compressibility, weight: 500}"
WIN_RATE = "{name: win_rate, options: {judge: jpeg_compressibility}}"


def find_rise(settings: Settings, method: str) -> Result | None:
    """The result of a method's short run, or None if there is no result."""
    return find(settings, f"{method}-rise", [rise_recipe(settings, method)])


def rise_recipe(settings: Settings, method: str) -> Recipe:
    """A method's recipe on seed 0, with small files as its reward; if it has win rates, small files are their judge.

    Rewards that are only recorded stay, because extensions may ask for them.
    """
    own = load_image_recipe(method, settings.overrides)
    trained = WIN_RATE if any(entry.name == "win_rate" for entry in own.rewards) else FILES
    rewards = ", ".join([trained, *(json.dumps(plain(entry)) for entry in own.rewards if entry.weight == 0)])
    iterations = max(1, round(ITERATIONS * settings.scale))
    changes = (
        f"rewards=[{rewards}]",
        f"evaluate={{every: {iterations}, seeds: 1, steps: 10, rewards: [{FILES}]}}",
        f"run={{iterations: {iterations}, seed: 0, checkpoint_every: {iterations}, sample_every: {iterations}}}",
    )
    return load_image_recipe(method, [*changes, *settings.overrides])


def refuse_few_prompts(settings: Settings, methods: Sequence[str]) -> None:
    """Refuse short runs with fewer held-out prompts than a standard error needs.

    Raises:
        ValueError: a run would have fewer than two held-out prompts.
    """
    for method in methods:
        recipe = rise_recipe(settings, method)
        count = len(read_heldout(recipe))
        if count < FEWEST_PROMPTS:
            cause = f"evaluate.prompts is {count}" if recipe.evaluate.prompts == count else "data.heldout is too short"
            raise ValueError(
                f"{method}: the standard error of its short run needs {FEWEST_PROMPTS} held-out prompts, and it would "
                f"have {count}, because {cause}; write evaluate.prompts={FEWEST_PROMPTS} or more, with as many prompts "
                "in data.heldout"
            )


def measure_rises(settings: Settings, methods: Sequence[str], report: Report) -> None:
    """Make the short runs that are missing, except runs that another process is making.

    A gradient that is not finite ends a run; the result then says so.
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
    """Kilobytes of the held-out images before and after, and the standard error of the mean difference.

    Args:
        samples: folder of a run's samples, with the samples of its first and last evaluation.
        iterations: number of iterations of the run.
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
