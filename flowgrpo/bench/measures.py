"""Measurements behind the claims of the documentation, each one command: `flowgrpo bench NAME`.

Every measurement compares figures within one process, and writes only its report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..configs.layers import merge
from ..configs.schema import Recipe
from ..core.addressing import address
from ..core.diagnostics import COLUMNS, step_statistics, summarise
from ..pipelines.experience import Experience
from ..pipelines.policy import FlowPolicy
from ..samplers.kernels import guard_weight, jacobian
from ..training.folder.run_folder import RunFolder
from ..training.planning import planner
from ..training.session import Session
from ..training.tasks import FlowTask
from ..training.trainer import Trainer
from .interruption import interruption

Report = Callable[[str], None]


class Silent:
    """A reporter that says nothing."""

    def started(self, trainer: Trainer) -> None:
        """Nothing."""

    def iteration(self, record: Any) -> None:
        """Nothing."""

    def evaluation(self, iteration: int, record: Any) -> None:
        """Nothing."""

    def alarm(self, alarm: Any) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def symptom(self, symptom: Any) -> None:
        """Nothing."""


def _changed(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(merge(recipe.model_dump(), sections))


def flow_task(trainer: Trainer) -> FlowTask:
    """The task of a trainer of images."""
    assert isinstance(trainer.task, FlowTask)
    return trainer.task


def _trainer(recipe: Recipe, folder: Path) -> Trainer:
    return Session(recipe, RunFolder.create(folder, "")).trainer(Silent())


def diagnosis(recipe: Recipe, folder: Path, report: Report, updates: int = 8) -> dict[str, Any]:
    """GRPO-Guard's diagnosis (2510.22319): log-ratios by denoising step and sign of the advantage, in both forms.

    The rollout is stochastic at every step but the last. Then `updates` optimizer steps on that rollout move the
    policy, and the same edges are scored with the plain ratio and with the Guard ratio.
    """
    recipe = _changed(recipe, sampler={"plan": {"name": "window", "window": "all"}}, objective={"surrogate": "clip"})
    trainer = _trainer(recipe, folder)
    policy = flow_task(trainer).policy
    if flow_task(trainer).sized is not None:
        raise ValueError("this measures rollouts of one size; name prompts without columns height and width")
    rows, experience = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, experience)
    advantages = trainer.advantages(scores, experience, rows)
    before = max(float(s.log_ratio.abs().max()) for s in _scored(policy, experience))
    report(f"largest |log ratio| before the first update: {before!r} (ratio {'exactly 1' if before == 0 else 'NOT 1'})")
    spread = _gradient_spread(policy, experience)
    report("gradient of the surrogate in the velocity, by step: RMS, and largest over smallest")
    for form, values in spread.items():
        listed = "  ".join(f"{v:.2e}" for v in values)
        report(f"  {form:<9} {listed}   {max(values) / min(values):.2f}×")
    for _ in range(updates):
        trainer.update(experience, advantages)
    forms = {}
    for form in ("gaussian", "guard"):
        policy.ratio = form  # type: ignore[assignment]
        total = torch.zeros(experience.plan.num_steps, 2, COLUMNS, dtype=torch.float64)
        with torch.no_grad():
            for scored in _scored(policy, experience):
                adv = advantages[scored.node][:, None]
                total += step_statistics(
                    scored.log_ratio, scored.steps, adv, None, None, num_steps=experience.plan.num_steps
                )
        forms[form] = {key: values.tolist() for key, values in summarise(total).items()}
        report(f"after {updates} updates, {form}: step, mean log-ratio, std, mean for A>0, mean for A<0, mean/std")
        for i in range(experience.plan.num_steps - 1):
            stats = forms[form]
            mean, std = stats["log_ratio_mean"][i], stats["log_ratio_var"][i] ** 0.5
            report(
                f"  {i:>2}  {mean:>+11.3e}  {std:>10.3e}  {stats['log_ratio_mean_pos'][i]:>+11.3e}  "
                f"{stats['log_ratio_mean_neg'][i]:>+11.3e}  {mean / max(std, 1e-30):>+7.3f}"
            )
    return {"first_error": before, "gradient_rms": spread, "log_ratio": forms, "updates": updates}


def _scored(policy: FlowPolicy, experience: Experience) -> list[Any]:
    with torch.no_grad():
        return [policy.score(experience, t, b) for t, b in experience.batches(0)]


def _gradient_spread(policy: FlowPolicy, experience: Experience) -> dict[str, list[float]]:
    """RMS over a latent of d(log r · weight)/dv at the sampling policy, by trained step: |J|/s·ε/D, and ε/D·δ|J|."""
    found: dict[str, list[float]] = {"plain": [], "guard": []}
    for transitions in experience.rollout.transitions:
        c = transitions.coefficients
        scale = abs(jacobian(c.sigma, c.sigma_next, c.kappa))
        state = transitions.state.to(transitions.x.device)
        old, x = transitions.velocity[state].float(), transitions.x[state].float()
        mean = (1 - c.sigma_next) * (x - c.sigma * old) + c.kappa * (x + (1 - c.sigma) * old)
        noise = (transitions.x_next.float() - mean) / c.std
        rms = float(noise.square().mean().sqrt()) / noise[0].numel()
        found["plain"].append(rms * scale / c.std)
        found["guard"].append(rms * scale * guard_weight(c))
    return found


def prefix(recipe: Recipe, folder: Path, report: Report, repeats: int = 3) -> dict[str, Any]:
    """Denoiser evaluations and time of a rollout with and without shared initial noise, by window position."""
    trainer = _trainer(recipe, folder)
    policy = flow_task(trainer).policy
    sigmas = policy.denoiser.probe.sigmas
    results: dict[str, Any] = {}
    rows = trainer.data.train.take(0, recipe.rollout.prompts)
    texts = [row.text for row in rows]
    keys = [address(0, k) for k in range(len(rows))]
    total = len(sigmas) - 1
    size = len(planner(recipe, sigmas)(0).trained_steps)
    report("window      evaluations shared / separate      seconds shared / separate    ratio")
    for start in sorted({0, (total - 1 - size) // 2, total - 1 - size}):
        window = {"name": "frozen", "size": size, "start": start}
        changed = {"name": "window", "window": window}
        plans = {
            shared: planner(_changed(recipe, sampler={"plan": {**changed, "shared_noise": shared}}), sigmas)(0)
            for shared in (True, False)
        }
        taken: dict[bool, list[float]] = {True: [], False: []}
        counted: dict[bool, int] = {}
        for _ in range(repeats):
            for shared, plan in plans.items():
                began = time.perf_counter()
                counted[shared] = policy.sample(texts, keys, plan).evaluations
                taken[shared].append(time.perf_counter() - began)
        seconds = {shared: sorted(values)[len(values) // 2] for shared, values in taken.items()}
        report(
            f"{start:>2}–{start + size - 1:<2}       {counted[True]:>11} / {counted[False]:<11}      "
            f"{seconds[True]:>9.2f} / {seconds[False]:<9.2f}   {seconds[True] / seconds[False]:.2f}"
        )
        results[f"{start}-{start + size - 1}"] = {
            "evaluations": [counted[True], counted[False]],
            "seconds": [seconds[True], seconds[False]],
            "per_prompt": [plans[True].counts().evaluations, plans[False].counts().evaluations],
        }
    return results


def batches(recipe: Recipe, folder: Path, report: Report) -> dict[str, Any]:
    """Differences of rollouts and gradients between calls of the denoiser with 1, 4 and all states."""
    trainer = _trainer(recipe, folder)
    rows = trainer.data.train.take(0, recipe.rollout.prompts)
    task = flow_task(trainer)
    policy, plan = task.policy, task.plan_for(0)
    keys = [address(0, k) for k in range(len(rows))]
    texts = tuple(row.text for row in rows)
    whole = policy.sample(texts, keys, plan)
    images = policy.decode(whole, texts)
    leaves = Experience(whole, plan, texts, images, 1, tuple(keys), beside=task.beside(policy, keys))
    scores = trainer.score(trainer.rewards, rows, leaves)
    advantages = trainer.advantages(scores, leaves, rows)
    results: dict[str, Any] = {}
    reference: dict[str, Tensor] = {}
    for size in (10**9, 4, 1):
        policy.batch = size
        again = policy.sample(texts, keys, plan)
        state = float((again.x - whole.x).abs().max())
        # Gradients are compared on the same rollout, cut into batches of this size.
        cut = replace(whole, transitions=tuple(replace(t, batches=_slices(len(t.x), size)) for t in whole.transitions))
        gradient = _gradient(trainer, replace(leaves, rollout=cut), advantages)
        reference = reference or gradient
        scale = max(float(g.abs().max()) for g in reference.values())
        off = max(float((gradient[n] - reference[n]).abs().max()) for n in reference) / scale
        name = "all" if size == 10**9 else str(size)
        report(f"batch {name:>3}: largest difference of final states {state:.1e}, of gradients {off:.1e} (relative)")
        results[name] = {"state_difference": state, "gradient_difference": off}
    return results


def _slices(count: int, size: int) -> tuple[slice, ...]:
    return tuple(slice(k, min(k + size, count)) for k in range(0, count, size))


def _gradient(
    trainer: Trainer, experience: Experience, advantages: Tensor, keep: Tensor | None = None
) -> dict[str, Tensor]:
    trainer.objective.prepare(experience)
    rows = torch.tensor(float(trainer.objective.rows(experience, 0, keep))).clamp(min=1.0)
    if (sums := trainer.objective.measure(experience, 0, advantages, keep)) is not None:
        trainer.objective.settle(sums)
    for batch in trainer.objective.batches(experience, 0, keep):
        trainer.objective.backward(experience, batch, advantages, keep, rows)
    named = trainer.task.weights.named_parameters()
    found = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
    trainer.optimizer.zero_grad(set_to_none=True)
    return found


MEASUREMENTS: dict[str, Callable[[Recipe, Path, Report], dict[str, Any]]] = {
    "diagnosis": diagnosis,
    "prefix": prefix,
    "batches": batches,
    "interruption": interruption,
}


def names() -> Sequence[str]:
    """Names of the measurements."""
    return tuple(MEASUREMENTS)
