"""Measures the first run of a user on real processes: its time, its held-out figures, and its gain on test prompts."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..configs.load import dump_recipe
from ..configs.schema import Recipe
from ..inference.inference import evaluate_model
from ..inference.opening import evaluation_recipe
from ..training.folder.run_folder import write_text
from .claims.report import plain
from .claims.results import hardware

KINDS = ("heldout", "test")
"""Prompts by which settings may have been chosen, and prompts that no run reads."""
POLL = 0.2
"""Seconds between two looks at a run."""


def first_run(
    recipe: Recipe, folder: Path, report: Callable[[str], None], seeds: Sequence[int] = (0, 1, 2)
) -> dict[str, Any]:
    """Run `flowgrpo train` with several seeds, one after another, and score each result on held-out and test prompts.

    Args:
        recipe: usually the default.
        folder: a new folder for the runs.
        report: called with lines of progress.
        seeds: of the runs.

    Returns:
        `before`: mean and standard error of the first reward of evaluations, on each kind of prompts. `runs`: for each
        seed the seconds from the command to the end of its process, the seconds until each quick evaluation was there,
        and the same scores after the run. `gains`: the mean gains. `hardware`: of this machine.
    """
    folder.mkdir(parents=True)
    runs: list[dict[str, Any]] = []
    before: dict[str, tuple[float, float]] = {}
    for seed in seeds:
        source, run = folder / f"recipe-{seed}.yaml", folder / f"run-{seed}"
        write_text(source, dump_recipe(recipe.model_copy(update={"run": recipe.run.model_copy(update={"seed": seed})})))
        seconds, figures = _timed([sys.executable, "-m", "flowgrpo", "train", str(source), "--out", str(run)], run)
        # The prompts and their noise are the same for all seeds.
        before = before or {kind: _score(run, kind, base=True) for kind in KINDS}
        after = {kind: _score(run, kind) for kind in KINDS}
        runs.append({"seed": seed, "seconds": round(seconds, 1), "figures_after": figures, "after": after})
        first = f", first held-out figure after {figures[0]:.0f} s" if figures else ""
        scores = ", ".join(f"{kind} {before[kind][0]:.3f} to {after[kind][0]:.3f}" for kind in KINDS)
        report(f"seed {seed}: {seconds:.0f} s{first}; {scores}")
    gains = {kind: statistics.fmean(run["after"][kind][0] - before[kind][0] for run in runs) for kind in KINDS}
    report("mean gain: " + ", ".join(f"{kind} {gain:+.3f}" for kind, gain in gains.items()))
    found: dict[str, Any] = plain({"before": before, "runs": runs, "gains": gains, "hardware": hardware()})
    return found


def _timed(command: list[str], run: Path) -> tuple[float, list[float]]:
    """Run a command; returns its seconds, and the seconds until each quick evaluation of the run was there."""
    began, moments = time.perf_counter(), list[float]()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(POLL)
        moments += [round(time.perf_counter() - began, 1)] * (_quick_figures(run) - len(moments))
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}")
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
