"""Measures the first run of a user on real processes: its time, its held-out figures, and its gain on test prompts."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..configs.load import dump_recipe
from ..configs.schema import Recipe
from ..inference.evaluation import evaluate_model
from ..inference.model_recipes import evaluation_recipe
from ..training.folder.files import explained
from ..training.folder.run_folder import write_text
from .children import ChildFailed, of_package, refuse_failure, started
from .claims.report import plain
from .claims.results import hardware

KINDS = ("heldout", "test")
"""Prompts by which settings may have been chosen, and prompts that no run reads."""
POLL = 0.2
"""Seconds between two looks at a run."""


def first_run(
    recipe: Recipe, folder: Path, report: Callable[[str], None], seeds: Sequence[int] = (0, 1, 2),
    write: Callable[[dict[str, Any]], None] = lambda figures: None,
) -> dict[str, Any]:  # fmt: skip
    """Run `flowgrpo train` with several seeds, one after another, and score each result on held-out and test prompts.

    A seed that fails is recorded, and the others go on. The folder of a run that was measured is removed.

    Args:
        recipe: usually the default.
        folder: a new folder for the runs.
        report: called with lines of progress.
        seeds: of the runs.
        write: called after each seed with the figures so far.

    Returns:
        `before`: mean and standard error of the first reward of evaluations, on each kind of prompts. `runs`: for each
        seed the seconds from the command to the end of its process, the seconds until each quick evaluation was there,
        and the same scores after the run. `failed`: seed and error of the runs that failed. `gains`: the mean gains of
        the other runs. `hardware`: of this machine.

    Raises:
        ChildFailed: some seeds have failed; `write` has had the figures of the others.
    """
    folder.mkdir(parents=True)
    runs: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    before: dict[str, tuple[float, float]] = {}
    found: dict[str, Any] = {}
    gains: dict[str, float] = {}
    for seed in seeds:
        try:
            run = _measured(recipe, folder, seed, before)
        except (ValueError, FloatingPointError, OSError) as error:
            told = (explained(error) if isinstance(error, OSError) else str(error)) or repr(error)
            failed.append({"seed": seed, "error": told})
            report(f"seed {seed}: failed; {told.splitlines()[-1]}")
        else:
            runs.append(run)
            report(_line(run, before))
        gains = _gains(runs, before)
        found = plain({"before": before, "runs": runs, "failed": failed, "gains": gains, "hardware": hardware()})
        write(found)
    counted = f" of {len(runs)} of {len(seeds)} seeds" if failed else ""
    if gains:
        report(f"mean gain{counted}: " + ", ".join(f"{kind} {gain:+.3f}" for kind, gain in gains.items()))
    if failed:
        errors = "\n".join(f"seed {one['seed']}: {one['error']}" for one in failed)
        raise ChildFailed(f"{len(failed)} of {len(seeds)} seeds failed\n{errors}")
    return found


def _measured(recipe: Recipe, folder: Path, seed: int, before: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The figures of one run, whose folder is removed; the first run also gives the scores before.

    Raises:
        ValueError, FloatingPointError, OSError: the run or its scoring failed; the folder of the run stays.
    """
    source, run = folder / f"recipe-{seed}.yaml", folder / f"run-{seed}"
    write_text(source, dump_recipe(recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": seed})})))
    seconds, figures = _timed(of_package(["train", str(source), "--out", str(run)]), run)
    after = {kind: _score(run, kind) for kind in KINDS}
    # The prompts and their noise are the same for all seeds.
    before.update({} if before else {kind: _score(run, kind, base=True) for kind in KINDS})
    shutil.rmtree(run, ignore_errors=True)
    return {"seed": seed, "seconds": round(seconds, 1), "figures_after": figures, "after": after}


def _gains(runs: Sequence[dict[str, Any]], before: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The mean gain of runs on each kind of prompts; empty without runs."""
    kinds = KINDS if runs else ()
    return {kind: statistics.fmean(run["after"][kind][0] - before[kind][0] for run in runs) for kind in kinds}


def _line(run: dict[str, Any], before: dict[str, tuple[float, float]]) -> str:
    first = f", first held-out figure after {run['figures_after'][0]:.0f} s" if run["figures_after"] else ""
    scores = ", ".join(f"{kind} {before[kind][0]:.3f} to {run['after'][kind][0]:.3f}" for kind in KINDS)
    return f"seed {run['seed']}: {run['seconds']:.0f} s{first}; {scores}"


def _timed(command: list[str], run: Path) -> tuple[float, list[float]]:
    """Run a command; returns its seconds, and the seconds until each quick evaluation of the run was there.

    Raises:
        ChildFailed: the command has failed.
    """
    log = run.with_name(f"{run.name}.log")
    began, moments = time.perf_counter(), list[float]()
    with started(command, log) as process:
        while process.poll() is None:
            time.sleep(POLL)
            moments += [round(time.perf_counter() - began, 1)] * (_quick_figures(run) - len(moments))
    refuse_failure(command, process.returncode, log)
    return time.perf_counter() - began, moments


def _quick_figures(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    return sum('"quick/' in line for line in lines)


def _score(run: Path, kind: str, base: bool = False) -> tuple[float, float]:
    """Mean of the first reward on prompts of a kind, and its standard error."""
    scores = evaluate_model(str(run), evaluation_recipe(str(run), None, []), split=kind, base=base)
    mean, error, _ = next(iter(scores.values()))
    return mean, error
