"""The runs behind the papers' claims: what is trained on the embedded default, and what is saved from each run.

Every method trains in its paper's proportions for the same number of iterations, with the same evaluation and seeds. An
interrupted run goes on from its run folder. Several processes may work on one folder of results: each takes a run that
no other process is making.

The unit of compute is one state through the denoiser. A state with gradients counts `GRADIENT_UNITS`, since a backward
pass costs about as much as two forward passes. States are counted while a run calls the denoiser. So passes for a
reference, for guidance or for noised data are included. Evaluations are not included. Seconds are of the process, see
`metering`.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...configs.load import dump_recipe
from ...configs.schema import Recipe
from ...training.folder.run_folder import RunFolder
from ...training.session import Session, start
from .forms import FORMS, TRAINED_ON, Form
from .metering import Meter, Report
from .results import Result, Settings, claimed, find, key_of, provenance, write_result

# Over this length, a run takes one to three minutes on one core, and every method gains many standard errors.
ITERATIONS = 8
EVALUATIONS = 2
EVALUATED = 150
"""Prompts of an evaluation, the first of the file; the skills take turns in it."""
GRADIENT_UNITS = 3
HELD_OUT = "scenes:test"
"""The prompts of all figures. Nothing is chosen on them."""
PAINT, DENSE = "paint", "gold_dense"
SETTLED = {
    "run.seed": "give the seeds with --seeds",
    "run.iterations": "give the length of the runs with --scale",
    "rewards": "runs train on the rewards that the claims are about; leave it out",
    "data.heldout": f"all figures are of the prompts {HELD_OUT}; leave it out",
    "evaluate.rewards": "the claims are judged by these rewards; leave it out",
    "evaluate.seeds": "an evaluation has one image for each prompt; leave it out",
}
"""Keys that no override of the command may change, because the report says what they are: key → what to do instead."""


@dataclass(frozen=True)
class Job:
    """Something to train on each seed.

    Attributes:
        label: the name in tables and files.
        form: the recipe in its paper's proportions.
        overrides: changes to that recipe.
        length: number of iterations, as a multiple of the common number.
    """

    label: str
    form: Form
    overrides: tuple[str, ...] = ()
    length: float = 1.0

    @property
    def method(self) -> str:
        """The recipe of the package."""
        return self.form.method


# Over-optimisation shows if the learned reward is trained on, each rollout is used several times, and the learning rate
# does not fall. KL, average and the scale of the advantage are made equal, so that only ratio, step weight and clip
# differ.
_LONG = (
    "rewards=[{name: proxy}]", "rollout.prompts=4", "optimizer.updates=4", "optimizer.schedule=constant",
    "optimizer.learning_rate=6e-4", "optimizer.ema=null", "penalties=[]", "advantage.scale=group", "advantage.ddof=0",
)  # fmt: skip
_JUDGED = "rewards=[{name: win_rate, options: {judge: proxy, margin: 0.02}}]"
TRAINED = (
    "dance_grpo", "mixgrpo", "mixgrpo_flash", "mixgrpo_flash_star", "dance_grpo_19of20", "branchgrpo_depth",
    "branchgrpo_mix", "flow_grpo", "tempflow_grpo", "diffusion_nft",
)  # fmt: skip
VARIANTS = (
    Job("flow_grpo+proxy", FORMS["flow_grpo"], _LONG, 2.0),
    Job("grpo_guard+proxy", FORMS["grpo_guard"], _LONG, 2.0),
    Job("pref_grpo+proxy", FORMS["pref_grpo"], (_JUDGED,)),
    Job("pref_grpo+pointwise", FORMS["pref_grpo"], ("rewards=[{name: proxy}]",)),
)


def jobs() -> dict[str, Job]:
    """Every run that claims need, by its label."""
    return {name: Job(name, FORMS[name]) for name in TRAINED} | {job.label: job for job in VARIANTS}


@lru_cache(maxsize=1024)
def recipe_of(job: Job, seed: int, settings: Settings) -> Recipe:
    """The recipe of one run: the form's own, with the common length, evaluation and seed."""
    iterations = max(EVALUATIONS, round(ITERATIONS * job.length * settings.scale))
    every = math.ceil(iterations / EVALUATIONS)
    rewards = (
        f"[{TRAINED_ON}, {{name: gold}}, {{name: gold, options: {{dense: true}}, label: {DENSE}}}, {{name: proxy}}]"
    )
    common = (
        f"data.heldout={HELD_OUT}",
        f"evaluate={{every: {every}, prompts: {EVALUATED}, take: first, seeds: 1, steps: 10, rewards: {rewards}}}",
        f"run={{iterations: {iterations}, seed: {seed}, checkpoint_every: 10, keep: 1, sample_every: {every}}}",
    )
    return job.form.recipe([*common, *job.overrides, *settings.overrides])


def find_run(settings: Settings, job: Job, seed: int) -> Result | None:
    """The result of one run, or None if there is no result."""
    return find(settings, f"{job.label}-seed{seed}", [recipe_of(job, seed, settings)])


def measure_run(settings: Settings, job: Job, seed: int, report: Report) -> bool:
    """Make the result of one run of a claim, see `make_run`."""
    recipe = recipe_of(job, seed, settings)
    head = {"kind": "run", "label": job.label, "method": job.method, "seed": seed}
    head |= {"overrides": [*job.overrides, *settings.overrides], "trained_on": trained_on(recipe)}
    return make_run(settings, f"{job.label}-seed{seed}", f"{job.label}, seed {seed}", recipe, head, report)


def make_run(
    settings: Settings, prefix: str, name: str, recipe: Recipe, head: Mapping[str, Any], report: Report
) -> bool:
    """Make the result of one run; an interrupted run goes on from where it stopped.

    A gradient that is not finite ends a run; the result then says so.

    Args:
        settings: where the result belongs.
        prefix: the beginning of the name of the result file.
        name: the run in the lines of progress.
        recipe: what to run.
        head: further values of the result.
        report: called with lines of progress.

    Returns:
        Whether there is a result now. If another process is making the run, nothing is done.
    """
    key = key_of([recipe])
    folder = settings.results / "runs" / f"{prefix}-{key}"
    with claimed(folder.with_name(f"{folder.name}.lock")) as mine:
        if not mine:
            report(f"{name}: another process is making this run")
            return False
        if find(settings, prefix, [recipe]) is not None:
            return True
        try:
            _train(recipe, folder, name, report)
            figures = summary(folder, recipe)
        except FloatingPointError as error:
            figures = {"failed": str(error)}
            report(f"{name}: {error}")
        whole = {**head, "key": key, "recipes": [dump_recipe(recipe)], **provenance(), **figures}
        write_result(settings.results / f"{folder.name}.json", whole)
    gc.collect()
    return True


def trained_on(recipe: Recipe) -> str:
    """The rewards of a recipe in words."""
    judges = [entry.options.get("judge") for entry in recipe.rewards]
    named = [f"{r.name} by {judge}" if judge else r.label or r.name for r, judge in zip(recipe.rewards, judges)]
    return ", ".join(named)


def _train(recipe: Recipe, folder: Path, name: str, report: Report) -> None:
    stands = (folder / "config.yaml").is_file()
    session = Session(recipe, RunFolder.open(folder)) if stands else start(recipe, folder)
    trainer = session.trainer(Meter(folder / "compute.jsonl", name, report))
    trainer.resume()
    trainer.train()
    assert session.run is not None
    session.run.release()


def summary(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Curves by iteration, evaluations with the compute and time before each, log-ratios by step, totals."""
    records = json_lines(folder / "metrics.jsonl")
    done = [r for r in records if r["iteration"] < recipe.run.iterations]
    counts = {line["iteration"]: line for line in json_lines(folder / "compute.jsonl")}
    names = sorted(
        {
            k
            for r in done
            for k, v in r.items()
            if isinstance(v, int | float) and not k.startswith(("eval/", "eval_error/"))
        }
    )
    curves: dict[str, list[Any]] = {name: [r.get(name) for r in done] for name in names}
    for name in ("forward", "trained_states", "trained_edges", "seconds"):
        curves[name] = [counts[r["iteration"]][name] for r in done]
    curves["compute"] = [f + GRADIENT_UNITS * t for f, t in zip(curves["forward"], curves["trained_states"])]
    marks = [r for r in records if any(key.startswith("eval/") for key in r)]
    at = [r["iteration"] for r in marks]
    scored = {key for r in marks for key in r if key.startswith("eval/")}
    evaluation = {key.removeprefix("eval/"): [r.get(key) for r in marks] for key in sorted(scored)}
    steps = recipe.optimizer.updates * recipe.optimizer.epochs
    evaluation |= {"iteration": at, "updates": [steps * k for k in at]}
    evaluation |= {name: [sum(curves[name][:k]) for k in at] for name in ("compute", "seconds")}
    spent = ("evaluations", "forward", "trained_states", "trained_edges", "compute", "seconds")
    return {
        "iterations": len(done),
        "images": sum(1 for r in json_lines(folder / "samples" / "index.jsonl") if _first_batch(r)),
        "curves": curves,
        "evaluation": evaluation,
        "steps": ratios_by_step(done),
        "totals": {name: sum(curves[name]) for name in spent if name in curves},
    }


def _first_batch(record: Mapping[str, Any]) -> bool:
    return bool(record["phase"] == "train" and record["iteration"] == 0)


def json_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a `.jsonl` file; a line that a crash cut short is ignored."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def ratios_by_step(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Trained step → count, mean and variance of the log-ratio, share clipped; pooled over iterations."""
    pooled: dict[str, list[float]] = {}
    for record in records:
        for step, stats in record.get("steps", {}).items():
            count, mean, var = (stats.get(key) for key in ("count", "log_ratio_mean", "log_ratio_var"))
            if not count or mean is None or var is None:
                continue
            sums = pooled.setdefault(step, [0.0] * 4)
            for k, value in enumerate((1.0, mean, var + mean**2, stats.get("clip_share") or 0.0)):
                sums[k] += count * value
    found = {}
    for step, (count, first, second, clipped) in sorted(pooled.items(), key=lambda item: int(item[0])):
        mean = first / count
        found[step] = {
            "count": count,
            "mean": mean,
            "var": max(second / count - mean**2, 0.0),
            "clipped": clipped / count,
        }
    return found


def apart(images: Tensor, owners: Sequence[int]) -> float | None:
    """Mean over prompts of the mean RMS pixel distance, in [0, 1], between two images [N, ...] of one prompt."""
    rows: dict[int, list[int]] = {}
    for row, owner in enumerate(owners):
        rows.setdefault(owner, []).append(row)
    flat = images.flatten(1).double()
    means = [float(torch.pdist(flat[group]).mean()) for group in rows.values() if len(group) > 1]
    return sum(means) / len(means) / math.sqrt(flat.shape[1]) if means else None
