"""How much of a batch's gradient is signal: `flowgrpo bench signal`.

The noise of its gradient often decides what a recipe should train, and how. A training run shows this only after hours,
and only with the noise of one run. This measurement shows it at the policy that a recipe starts from.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..configs.schema import Recipe
from .measures import Report, _gradient, _trainer, flow_task

BATCHES = 48
FEWEST = 3


@dataclass(frozen=True)
class Share:
    """Signal in the gradient of one batch, as a share of its mean square.

    Attributes:
        value: the mean inner product of two batches' gradients, divided by their mean square. It is 1 if all gradients
            are equal, and 0 on average if they have nothing in common. It may be below 0.
        error: standard error of the value.
    """

    value: float
    error: float


def signal_share(gradients: Tensor) -> Share:
    """The share of signal in gradients, with its standard error; numerator and denominator are unbiased.

    The error is the jackknife's. From 4 batches on, without what the jackknife counts twice: the part of each inner
    product that neither of its two gradients explains (Efron and Stein, The jackknife estimate of variance, 1981). If
    there is little signal, this part is nearly everything.

    Args:
        gradients: [N, P], the gradients of N independent batches, 3 or more.

    Raises:
        ValueError: fewer than 3 batches.
    """
    count = len(gradients)
    if count < FEWEST:
        raise ValueError(f"{count} gradients do not tell signal from noise; use {FEWEST} or more")
    wide = gradients.double()
    gram = wide @ wide.T
    own, everything = gram.diagonal(), gram.sum()

    def share(total: Tensor, squares: Tensor, n: int) -> Tensor:
        return (total - squares) / (n - 1) / squares.clamp(min=1e-300)

    left_out = share(everything - 2 * gram.sum(1) + own, own.sum() - own, count - 1)
    variance = (left_out - left_out.mean()).square().sum() * (count - 1) / count
    value = share(everything, own.sum(), count)
    if count > FEWEST:
        alone = _of_pairs_alone(gram, own, value)
        least = 2 * alone / (count * (count - 1))
        variance = torch.maximum(variance - 2 * alone / ((count - 1) * (count - 2)), least)
    return Share(float(value), float(variance.sqrt()))


def _of_pairs_alone(gram: Tensor, own: Tensor, value: Tensor) -> Tensor:
    """Variance of what a pair adds to the share and neither of its two gradients explains.

    Args:
        gram: [N, N] inner products, N of 4 or more.
        own: [N] their diagonal.
        value: the share.
    """
    count = len(own)
    pairs = (gram - value * (own[:, None] + own) / 2) / own.mean().clamp(min=1e-300)
    pairs.fill_diagonal_(0.0)
    effect = pairs.sum(1) / (count - 2)
    rest = pairs - effect[:, None] - effect
    return rest.fill_diagonal_(0.0).square().sum() / (count * (count - 3))


def signal(recipe: Recipe, folder: Path, report: Report, batches: int = BATCHES) -> dict[str, Any]:
    """Share of signal in the gradient of an iteration's batch, by the denoising steps that it trains.

    Each batch is an iteration of the recipe at its initial weights, with its own prompts and noise. KL and curriculum
    are left out, because they have no effect at these weights. `scaled` divides each number of a gradient by its root
    mean square over the batches, which is nearly what Adam does. Seconds cover sampling, rewards and gradient.
    """
    penalties = [penalty for penalty in recipe.penalties if penalty.name != "kl"]
    others = [chosen for chosen in recipe.extensions if chosen.name != "curriculum"]
    # There may be more batches than the recipe has iterations, so their prompts are encoded when they are drawn.
    model = recipe.model.model_copy(update={"release_text_encoders": False})
    changes = {"penalties": penalties, "extensions": others, "model": model}
    trainer = _trainer(recipe.model_copy(update=changes), folder)
    task = flow_task(trainer)
    gradients: dict[str, list[Tensor]] = {}
    seconds: dict[str, float] = {}
    for k in range(batches):
        trained = ", ".join(map(str, task.plan_for(k).trained_steps)) or "noised images"
        began = time.perf_counter()
        rows, experience = trainer.collect(k)
        advantages, keep = trainer.compared(trainer.score(trainer.rewards, rows, experience), experience, rows)
        found = _gradient(trainer, experience, advantages, keep)
        seconds[trained] = seconds.get(trained, 0.0) + time.perf_counter() - began
        flat = torch.cat([found[name].flatten().cpu() for name in sorted(found)])
        gradients.setdefault(trained, []).append(flat)
    results = {}
    report("steps trained    batches    share of signal, plain        scaled               seconds a batch")
    for trained, listed in gradients.items():
        if len(listed) < FEWEST:
            report(f"{trained:<15} {len(listed):>8}    too few; measure more batches, or a window that does not move")
            continue
        stacked = torch.stack(listed)
        rms = stacked.double().square().mean(0).sqrt()
        plain, scaled = signal_share(stacked), signal_share(stacked / rms.clamp(min=1e-30).to(stacked))
        taken = seconds[trained] / len(listed)
        report(
            f"{trained:<15} {len(listed):>8}    {plain.value:>+9.4f} ± {plain.error:.4f}    "
            f"{scaled.value:>+9.4f} ± {scaled.error:.4f}    {taken:>9.2f}"
        )
        results[trained] = {
            "batches": len(listed), "seconds": taken,
            "plain": [plain.value, plain.error], "scaled": [scaled.value, scaled.error],
        }  # fmt: skip
    return {"images": recipe.rollout.prompts * recipe.rollout.group, "steps": results}
