"""Tests on real processes that a run that was killed at any moment resumes to the same result, bit for bit."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..configs.load import dump_recipe
from ..configs.schema import Recipe
from ..training.folder.leftovers import RESULTS
from ..training.folder.model_card import CARD, placed_card
from ..training.folder.run_folder import write_text
from .children import of_package, refuse_failure, started

KILLS = 12


def interruption(recipe: Recipe, folder: Path, report: Callable[[str], None], kills: int = KILLS) -> dict[str, Any]:
    """Run a recipe by command without a break, then repeatedly with SIGKILL at random moments, and compare the results.

    `flowgrpo resume` continues a broken run (`flowgrpo train` if the run died before it had a folder). The run is
    killed again and again until it ends by itself. Then new runs follow, until `kills` processes were killed. After the
    last kill no more moment is drawn, so that a run on a machine that has become slower also ends. The moments are
    uniform over the time that the unbroken process took, and the run seed seeds them.

    Args:
        recipe: give it few iterations and prompts: `run.iterations=8 evaluate.prompts=16 run.checkpoint_every=2`.
        folder: a new folder for the runs.
        report: called with lines of progress.
        kills: how many processes to kill.

    Returns:
        The moments in seconds after the start, the iterations logged by then, and the files that differ between
        the unbroken run and any broken run: metrics without times, index and pictures of the samples, weights.

    Raises:
        ChildFailed: a run failed without being killed.
    """
    folder.mkdir(parents=True)
    source = folder / "recipe.yaml"
    write_text(source, dump_recipe(recipe))
    began = time.perf_counter()
    whole = folder / "whole"
    _attempt(source, whole, None)
    duration = time.perf_counter() - began
    report(f"unbroken run: {recipe.run.iterations} iterations in {duration:.0f} s")
    reference, draw = contents(whole), random.Random(recipe.run.seed)
    killed: list[dict[str, Any]] = []
    different: set[str] = set()
    runs = 0
    while len(killed) < kills:
        run = folder / f"broken-{runs}"
        runs += 1
        while (moment := _attempt(source, run, draw.uniform(0, duration) if len(killed) < kills else None)) is not None:
            killed.append({"run": runs, "seconds": round(moment, 2), "iterations": _logged(run)})
            report(f"run {runs}: killed after {moment:.1f} s with {_logged(run)} iterations logged")
        found = contents(run)
        off = sorted(name for name in {*found, *reference} if found.get(name) != reference.get(name))
        different.update(off)
        report(f"run {runs}: ended; {'equal to the last bit' if not off else 'DIFFERENT: ' + ', '.join(off)}")
    report(f"{len(killed)} kills in {runs} runs: {'all equal' if not different else 'NOT EQUAL'}")
    return {"seconds": duration, "kills": killed, "runs": runs, "files": len(reference), "different": sorted(different)}


def _attempt(source: Path, run: Path, seconds: float | None) -> float | None:
    """Start or continue a run, and kill it after some seconds; returns the moment, or None if the run ended before."""
    stands = (run / "config.yaml").is_file()
    command = of_package(["resume", str(run)] if stands else ["train", str(source), "--out", str(run)])
    log = run.with_name(f"{run.name}.log")
    began = time.perf_counter()
    with started(command, log) as process:
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return time.perf_counter() - began
    refuse_failure(command, process.returncode, log)
    return None


def _logged(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text(encoding="utf-8").count("\n") if metrics.is_file() else 0


def contents(run: Path) -> dict[str, bytes]:
    """The contents that must be equal between runs, by file: metrics without times, samples, and results."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timeless = [{key: value for key, value in r.items() if not key.startswith("time/")} for r in records]
    found = {"metrics.jsonl": json.dumps(timeless, sort_keys=True).encode()}
    for part in ("samples", *RESULTS):
        for file in sorted((run / part).rglob("*")):
            if file.is_file():
                read = {".safetensors": _tensors, ".json": _settings, CARD: _card}.get(
                    CARD if file.name == CARD else file.suffix, Path.read_bytes
                )
                found[str(file.relative_to(run))] = read(file)
    return found


def _card(file: Path) -> bytes:
    """A model card without the folder of its run."""
    return placed_card(file.read_text(encoding="utf-8"), ".").encode()


def _settings(file: Path) -> bytes:
    """The content of a JSON file in a fixed order; peft keeps names in sets, whose order differs between processes."""

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: ordered(inner) for key, inner in sorted(value.items())}
        return sorted(map(ordered, value), key=json.dumps) if isinstance(value, list) else value

    return json.dumps(ordered(json.loads(file.read_bytes()))).encode()


def _tensors(file: Path) -> bytes:
    """The tensors of a safetensors file; its header keeps metadata in an order that differs between processes."""
    tensors = load_file(file)
    parts = [f"{k} {v.dtype} {tuple(v.shape)}\n".encode() + _raw(v) for k, v in sorted(tensors.items())]
    return b"".join(parts)


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
