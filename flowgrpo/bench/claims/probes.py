"""Measurements behind the papers' claims that need no training: seconds an iteration, exploration, gradients.

Each measurement writes one result file. As for the runs, the name of the file has a key.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...configs.layers import merge
from ...configs.load import dump_recipe, recipe_names
from ...configs.schema import Recipe
from ...training.credit.from_scores import Credit
from ...training.folder.run_folder import RunFolder
from ...training.planning import planner
from ...training.session import Session
from ...training.trainer import Trainer
from ..measures import Silent, _gradient, _gradient_spread, flow_task
from .results import PACKAGE, Result, Settings, claimed, digest, find, key_of, provenance, write_result
from .trainings import Job, Report, apart, recipe_of

BASELINES = ("dance_grpo", "flow_grpo")
REPEATS = 5
TOGETHER = 6
# Exploration draws two batches of 96 images for each seed and noise level; the variance of a gradient needs 16 batches.
EXPLORED = 2
DRAWN = 16
ETAS: dict[str, tuple[float, ...]] = {
    "flow_sde": (0.3, 0.5, 0.7, 0.9, 1.2),
    "dance_sde": (0.15, 0.3, 0.5, 0.7, 0.9),
    "cps": (0.3, 0.5, 0.7, 0.9),
    "sage": (0.3, 0.5, 0.7, 0.9, 1.2),
}


def _loaded(recipe: Recipe, folder: Path) -> Trainer:
    return Session(recipe, RunFolder.create(folder, "")).trainer(Silent())


def _probe_code() -> str:
    return digest(PACKAGE / "bench" / name for name in ("measures.py", "claims/probes.py"))


# -- seconds an iteration ----------------------------------------------------------------------------------------------


def baselines() -> list[str]:
    """The methods of the package that seconds are compared with."""
    known = recipe_names("images")
    return [name for name in BASELINES if name in known]


def find_time(settings: Settings, method: str) -> Result | None:
    """The timing of a method, or None if there is no result."""
    return find(settings, f"{method}-time", _timed(settings, method), _probe_code(), str(REPEATS))


def _timed(settings: Settings, method: str) -> list[Recipe]:
    """Recipes of a method and the baselines, without saved samples: saving would count as time of an iteration."""
    names = dict.fromkeys([method, *baselines()])
    return [recipe_of(Job(name, name, ("run.sample_every=1000000",)), 0, settings) for name in names]


def measure_times(settings: Settings, methods: Sequence[str], report: Report) -> None:
    """Time whole iterations of methods and of the baselines, in turn, in this process.

    The iterations are spread evenly over a run, because a window makes early and late iterations differ. Loading and
    the first iteration do not count. `TOGETHER` methods take turns, so that one measurement of a baseline serves all of
    them.
    """
    todo = [method for method in methods if find_time(settings, method) is None]
    for first in range(0, len(todo), TOGETHER):
        with ExitStack() as locks:
            mine = {}
            for method in todo[first : first + TOGETHER]:
                name = f"{method}-time-{key_of(_timed(settings, method), _probe_code(), str(REPEATS))}"
                free = locks.enter_context(claimed(settings.results / "runs" / f"{name}.lock"))
                if free and find_time(settings, method) is None:
                    mine[method] = name
            if mine:
                _time_together(settings, mine, report)


def _time_together(settings: Settings, names: Mapping[str, str], report: Report) -> None:
    """Time some methods; write the figures of each method and the baselines into the method's file."""
    recipes = {name: _timed(settings, name)[0] for name in dict.fromkeys([*names, *baselines()])}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {name: _warm(recipe, Path(folder) / name) for name, recipe in recipes.items()}
        figures = interleaved(trainers, recipes[next(iter(names))].run.iterations)
    for method, file in names.items():
        shown = dict.fromkeys([method, *baselines()])
        head = {"kind": "time", "label": method, "recipes": [dump_recipe(recipes[name]) for name in shown]}
        own = figures | {"seconds": {name: figures["seconds"][name] for name in shown}}
        write_result(settings.results / f"{file}.json", head | provenance() | own)
        report(f"{method}: {_ratios(own['seconds'], method)}")


def _warm(recipe: Recipe, folder: Path) -> Trainer:
    trainer = _loaded(recipe, folder)
    trainer.iterate(0)
    return trainer


def interleaved(trainers: Mapping[str, Trainer], iterations: int) -> dict[str, Any]:
    """Seconds of `REPEATS` iterations of each trainer, in turn; the order is reversed every other time."""
    numbers = [int((k + 0.5) * iterations / REPEATS) for k in range(REPEATS)]
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn, number in enumerate(numbers):
        for name in list(trainers)[:: -1 if turn % 2 else 1]:
            trainers[name].clock.lap()  # waits for an accelerator, like the end of an iteration
            began = time.perf_counter()
            trainers[name].iterate(number)
            seconds[name].append(time.perf_counter() - began)
    return {"iterations": numbers, "seconds": seconds}


def _ratios(seconds: Mapping[str, Sequence[float]], method: str) -> str:
    own = sum(seconds[method])
    listed = [f"{own / sum(seconds[name]):.2f} of {name}" for name in baselines()]
    return ", ".join([f"{own / REPEATS:.2f} s an iteration", *listed])


# -- exploration, and gradients at the untrained policy ----------------------------------------------------------------


@dataclass(frozen=True)
class ClaimProbe:
    """A measurement of the policy that a recipe starts from.

    Attributes:
        method: the recipe.
        measure: called with a trainer, the seeds and a report; returns the figures of the result.
        overrides: changes to the recipe.
    """

    method: str
    measure: Callable[[Trainer, Sequence[int], Report], dict[str, Any]]
    overrides: tuple[str, ...] = ()


def find_probe(settings: Settings, name: str) -> Result | None:
    """The result of a probe, or None if there is no result."""
    seeds = settings.seeds
    return find(settings, f"probe-{name}", [_probed(settings, name)], _probe_code(), str(seeds), seeds=list(seeds))


def _probed(settings: Settings, name: str) -> Recipe:
    probe = PROBES[name]
    return recipe_of(Job(name, probe.method, probe.overrides), 0, settings)


def measure_probe(settings: Settings, name: str, report: Report) -> None:
    """Make the result of a probe, unless there is a result or another process is making it."""
    recipe = _probed(settings, name)
    file = f"probe-{name}-{key_of([recipe], _probe_code(), str(settings.seeds))}"
    with claimed(settings.results / "runs" / f"{file}.lock") as mine, tempfile.TemporaryDirectory() as folder:
        if not mine or find_probe(settings, name) is not None:
            return
        head = {"kind": "probe", "label": name, "seeds": settings.seeds, "recipes": [dump_recipe(recipe)]}
        trainer = _loaded(recipe, Path(folder) / "run")
        figures = PROBES[name].measure(trainer, settings.seeds, lambda text: report(f"{name}: {text}"))
        write_result(settings.results / f"{file}.json", head | provenance() | figures)


def exploration(trainer: Trainer, seeds: Sequence[int], report: Report) -> dict[str, Any]:
    """Rewards and diversity of the images of a group, for several kernels and noise levels, from one shared noise.

    Returns:
        kernel → a list with an entry for each noise level: `eta`, and `diversity` (see `apart`) and each reward, each a
        list by seed.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    task = flow_task(trainer)
    sigmas = task.policy.denoiser.probe.sigmas
    for kernel, etas in ETAS.items():
        for eta in etas:
            changed = {"kernel": {"name": kernel, "eta": eta}, "plan": {"shared_noise": True}}
            recipe = merge(trainer.recipe.model_dump(), {"sampler": changed})
            task.plan_for = planner(Recipe.model_validate(recipe), sigmas)
            by_seed = [_explored(trainer, seed) for seed in seeds]
            entry = {"eta": eta} | {name: [one[name] for one in by_seed] for name in by_seed[0]}
            found.setdefault(kernel, []).append(entry)
            shown = ", ".join(f"{k} {sum(v) / len(v):.4f}" for k, v in entry.items() if isinstance(v, list))
            report(f"{kernel}, eta {eta}: {shown}")
    return {"kernels": found}


def _explored(trainer: Trainer, seed: int) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for batch in range(EXPLORED):
        rows, experience = trainer.collect(seed * EXPLORED + batch)
        scores = trainer.score(trainer.evaluation, rows, experience)
        distance = apart(experience.samples.flatten(1), experience.prompt_of_sample)
        sums.setdefault("diversity", []).append(distance or 0.0)
        for name, mean in zip(scores.names, scores.values.nanmean(0).tolist()):
            sums.setdefault(name, []).append(mean)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def gradient_variance(trainer: Trainer, seeds: Sequence[int], report: Report) -> dict[str, Any]:
    """Variance of the gradient of one batch for three baselines, on the same batches at the untrained policy.

    Rewards are not scaled. So the gradient without a baseline and the gradient with the leave-one-out baseline have the
    same expectation. The group's mean shrinks the expectation by (G - 1)/G.

    Returns:
        For each baseline: the squared distance from the mean gradient by batch, and the squared norm of the mean.
    """
    gradients: dict[str, list[Tensor]] = {}
    kept = trainer.credit
    for batch in range(DRAWN):
        rows, experience = trainer.collect(batch)
        scores = trainer.score(trainer.rewards, rows, experience)
        for baseline in ("none", "mean", "loo"):
            recipe = trainer.recipe.model_dump()
            recipe["advantage"] = {"name": "group", "baseline": baseline, "scale": "none"}
            trainer.credit = Credit(Recipe.model_validate(recipe))
            found = _gradient(trainer, experience, trainer.advantages(scores, experience, rows))
            gradients.setdefault(baseline, []).append(torch.cat([g.flatten().cpu() for g in found.values()]))
        trainer.credit = kept
    squared, norm = {}, {}
    for baseline, drawn in gradients.items():
        stacked = torch.stack(drawn).double()
        mean = stacked.mean(0)
        # Scaled by n / (n - 1), so that the mean of these numbers is the unbiased variance.
        squared[baseline] = ((stacked - mean).square().sum(1) * DRAWN / (DRAWN - 1)).tolist()
        norm[baseline] = float(mean.square().sum())
        report(f"baseline {baseline}: variance {sum(squared[baseline]) / DRAWN:.3e}, |mean|² {norm[baseline]:.3e}")
    return {"squared": squared, "mean_squared": norm}


def gradient_spread(trainer: Trainer, seeds: Sequence[int], report: Report) -> dict[str, Any]:
    """Size of the surrogate's gradient in the velocity by denoising step, with the plain ratio and Guard's ratio."""
    found: dict[str, list[list[float]]] = {"plain": [], "guard": []}
    for seed in seeds:
        spread = _gradient_spread(flow_task(trainer).policy, trainer.collect(seed)[1])
        for form, values in spread.items():
            found[form].append(values)
    for form, by_seed in found.items():
        report(f"{form}: largest over smallest {', '.join(f'{max(v) / min(v):.2f}' for v in by_seed)}")
    return {"by_step": found}


PROBES = {
    "exploration": ClaimProbe("flow_grpo", exploration),
    "gradient_variance": ClaimProbe("loop_diffusion", gradient_variance, ("optimizer.updates=1",)),
    "gradient_spread": ClaimProbe("flow_grpo", gradient_spread),
}


def probes() -> list[str]:
    """Names of the probes whose recipe the package has."""
    names = recipe_names("images")
    return [name for name, probe in PROBES.items() if probe.method in names]
