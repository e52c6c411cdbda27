"""Measurements behind the papers' claims that need no training: exploration, and gradients at the untrained policy.

Each measurement writes one result file. As for the runs, the name of the file has a key.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...configs.layers import merge
from ...configs.load import dump_recipe
from ...configs.schema import Recipe
from ...training.credit.from_scores import Credit
from ...training.folder.run_folder import RunFolder
from ...training.planning import planner
from ...training.session import Session
from ...training.trainer import Trainer
from ..measures import Silent, _gradient, _gradient_spread, flow_task
from .forms import FORMS
from .results import PACKAGE, Result, Settings, claimed, digest, find, key_of, provenance, write_result
from .trainings import Job, Report, apart, recipe_of

# Each number of a probe is a mean or an interval over draws. A draw is a rollout with its own prompts and noise.
EXPLORED, DRAWN, SPREAD, VANISHED = 8, 16, 4, 6
ETAS: dict[str, tuple[float, ...]] = {"flow_sde": (0.5, 0.7, 0.9, 1.2), "sage": (0.3, 0.5, 0.7)}
SHRUNK = (1.0, 0.1, 0.01, 0.001, 0.0)
"""Factors of the differences of rewards within a group."""


def loaded(recipe: Recipe, folder: Path) -> Trainer:
    """A trainer at the untrained policy."""
    return Session(recipe, RunFolder.create(folder, "")).trainer(Silent())


def probe_code() -> str:
    """Hash of the code of the measurements without training."""
    return digest(PACKAGE / "bench" / name for name in ("measures.py", "claims/probes.py", "claims/timings.py"))


@dataclass(frozen=True)
class ClaimProbe:
    """A measurement of the policy that a recipe starts from.

    Attributes:
        method: a name of `FORMS`.
        measure: called with a trainer and a report; returns the figures of the result.
        overrides: changes to the form.
    """

    method: str
    measure: Callable[[Trainer, Report], dict[str, Any]]
    overrides: tuple[str, ...] = ()


def find_probe(settings: Settings, name: str) -> Result | None:
    """The result of a probe, or None if there is no result."""
    return find(settings, f"probe-{name}", [_probed(settings, name)], probe_code())


def _probed(settings: Settings, name: str) -> Recipe:
    probe = PROBES[name]
    return recipe_of(Job(name, FORMS[probe.method], probe.overrides), 0, settings)


def measure_probe(settings: Settings, name: str, report: Report) -> None:
    """Make the result of a probe, unless there is a result or another process is making it."""
    recipe = _probed(settings, name)
    file = f"probe-{name}-{key_of([recipe], probe_code())}"
    with claimed(settings.results / "runs" / f"{file}.lock") as mine, tempfile.TemporaryDirectory() as folder:
        if not mine or find_probe(settings, name) is not None:
            return
        head = {"kind": "probe", "label": name, "recipes": [dump_recipe(recipe)]}
        trainer = loaded(recipe, Path(folder) / "run")
        figures = PROBES[name].measure(trainer, lambda text: report(f"{name}: {text}"))
        write_result(settings.results / f"{file}.json", head | provenance() | figures)


def exploration(trainer: Trainer, report: Report) -> dict[str, Any]:
    """Rewards and diversity of the images of a group, for several kernels and noise levels, from one shared noise.

    A draw has the same prompts and the same noises for all kernels and levels.

    Returns:
        kernel → a list with an entry for each noise level: `eta`, and `diversity` (see `apart`) and each reward, each a
        list by draw.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    task = flow_task(trainer)
    sigmas = task.policy.denoiser.probe.sigmas
    for kernel, etas in ETAS.items():
        for eta in etas:
            changed = {"kernel": {"name": kernel, "eta": eta}, "plan": {"shared_noise": True}}
            recipe = merge(trainer.recipe.model_dump(), {"sampler": changed})
            task.plan_for = planner(Recipe.model_validate(recipe), sigmas)
            drawn = [_explored(trainer, draw) for draw in range(EXPLORED)]
            entry = {"eta": eta} | {name: [one[name] for one in drawn] for name in drawn[0]}
            found.setdefault(kernel, []).append(entry)
            shown = ", ".join(f"{k} {sum(v) / len(v):.4f}" for k, v in entry.items() if isinstance(v, list))
            report(f"{kernel}, eta {eta}: {shown}")
    return {"kernels": found}


def _explored(trainer: Trainer, draw: int) -> dict[str, float]:
    rows, experience = trainer.collect(draw)
    scores = trainer.score(trainer.evaluation, rows, experience)
    found = {"diversity": apart(experience.samples.flatten(1), experience.prompt_of_sample) or 0.0}
    return found | dict(zip(scores.names, scores.values.nanmean(0).tolist()))


def gradient_variance(trainer: Trainer, report: Report) -> dict[str, Any]:
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


def gradient_spread(trainer: Trainer, report: Report) -> dict[str, Any]:
    """Size of the surrogate's gradient in the velocity by denoising step, with the plain ratio and Guard's ratio."""
    found: dict[str, list[list[float]]] = {"plain": [], "guard": []}
    for draw in range(SPREAD):
        spread = _gradient_spread(flow_task(trainer).policy, trainer.collect(draw)[1])
        for form, values in spread.items():
            found[form].append(values)
    for form, by_seed in found.items():
        report(f"{form}: largest over smallest {', '.join(f'{max(v) / min(v):.2f}' for v in by_seed)}")
    return {"by_step": found}


def vanishing(trainer: Trainer, report: Report) -> dict[str, Any]:
    """Norm of the gradient while the rewards of each group approach their mean, for two credits on the same rollouts.

    The mean of a group stays. So only the differences within the groups vanish, as they do when a policy converges.

    Returns:
        `shrunk`, and for `value` (VGPO's credit) and `relative` (advantages of the group alone): a list by draw of the
        norms for each factor of `SHRUNK`.
    """
    own = flow_task(trainer).recipe
    relative = {"advantage": {"name": "group", "scale": "group", "ddof": 1, "eps": 1e-4}, "credit": "leaf"}
    credits = {
        "value": own,
        "relative": Recipe.model_validate({**own.model_dump(), **relative} | {"sampler": _without_previews(own)}),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in credits}
    kept = trainer.credit
    for draw in range(VANISHED):
        rows, experience = trainer.collect(draw)
        scores = trainer.score(trainer.rewards, rows, experience)
        for name, recipe in credits.items():
            norms = []
            for factor in SHRUNK:
                trainer.credit = Credit(recipe)
                shrunk = replace(scores, values=toward_means(scores.values, experience.prompt_of_sample, factor))
                gradients = _gradient(trainer, experience, trainer.advantages(shrunk, experience, rows))
                norms.append(float(torch.cat([g.flatten() for g in gradients.values()]).norm()))
            found[name].append(norms)
        trainer.credit = kept
    for name, by_draw in found.items():
        means = [sum(column) / len(column) for column in zip(*by_draw)]
        report(f"{name}: {', '.join(f'{f:g} → {m:.2e}' for f, m in zip(SHRUNK, means))}")
    return {"shrunk": list(SHRUNK), **found}


def _without_previews(recipe: Recipe) -> dict[str, Any]:
    """The sampler of a recipe for a credit that reads no previews."""
    return merge(recipe.sampler.model_dump(), {"plan": {"probe": None}})


def toward_means(values: Tensor, owners: Sequence[int], factor: float) -> Tensor:
    """Scores [N, K] whose distance from the mean of their owner's scores is multiplied by a factor; NaN stays."""
    found = values.clone()
    places = torch.as_tensor(list(owners))
    for owner in places.unique():
        own = places == owner
        mean = values[own].nanmean(0)
        found[own] = mean + factor * (values[own] - mean)
    return found


PROBES = {
    "exploration": ClaimProbe("flow_grpo", exploration, ("rollout.prompts=24", "rollout.group=4")),
    "gradient_variance": ClaimProbe("loop_diffusion", gradient_variance, ("rollout.prompts=2", "optimizer.updates=1")),
    "gradient_spread": ClaimProbe("flow_grpo", gradient_spread, ("rollout.prompts=4", "rollout.group=12")),
    "vanishing": ClaimProbe("vgpo", vanishing, ("rollout.prompts=4", "rollout.group=12", "optimizer.updates=1")),
}


def probes() -> list[str]:
    """Names of the probes."""
    return list(PROBES)
