"""What a reward prefers when it is optimised: a short run on an embedded model, looked at before and after."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..configs.load import load_recipe
from ..configs.schema import AnyRecipe
from ..rewards.base import RewardSpec
from ..rewards.pixels import load_picture
from ..training.folder.run_folder import RunFolder
from ..training.reporting.reporter import Reporter
from ..training.session import start
from .entries import YARDSTICKS
from .findings import NOTE, WARNING, Report, finite

CLEAR = 2.0
"""A change counts if it is more than this number of standard errors."""
VISIBLE = 1e-4
"""Smallest change of a feature that is reported; a smaller change is rounding."""


@dataclass(frozen=True)
class OptimisedSample:
    """A held-out sample before and after: its prompt, the two pictures or completions, and the scores by name."""

    prompt: str
    prompt_id: int
    before: str
    after: str
    scores_before: Mapping[str, float | None]
    scores_after: Mapping[str, float | None]

    def gain(self, name: str) -> float:
        """Score after, minus score before; NaN where one is missing."""
        one, other = self.scores_before[name], self.scores_after[name]
        return math.nan if one is None or other is None else other - one


@dataclass(frozen=True)
class Change:
    """A mean before and after, the mean change and its standard error over prompts.

    All are NaN if no sample has a number both before and after. With one prompt, only the error is NaN.
    """

    before: float
    after: float
    change: float
    error: float

    @property
    def clear(self) -> bool:
        """Whether the change is more than two standard errors."""
        return abs(self.change) > CLEAR * self.error

    def record(self) -> dict[str, float | None]:
        """The figures for JSON; one that is not finite is None."""
        return {name: finite(value) for name, value in vars(self).items()}


def short_recipe(spec: RewardSpec, task: str, iterations: int, label: str) -> AnyRecipe:
    """A recipe of the task, made short: a small rollout, one reward, evaluated before and after.

    Args:
        spec: the reward.
        task: "images" or "text".
        iterations: number of iterations.
        label: the name under which the reward is reported.

    Raises:
        RecipeError: an option has no place in a recipe.
    """
    own = {"name": spec.name, "options": dict(spec.options), "label": label, "time_limit": spec.time_limit}
    others = [
        {"name": other.name, "options": dict(other.options), "label": other.label or other.name}
        for other in YARDSTICKS[task]
        if (other.label or other.name) != label
    ]
    overrides: dict[str, Any] = {
        "name": "rewards_check",
        "rewards": [own],
        "evaluate.rewards": [own, *others],
        "evaluate.every": iterations,
        "run.iterations": iterations,
        "run.checkpoint_every": iterations,
        "run.sample_every": iterations,
    }
    if task == "images":
        overrides |= {
            "rollout": {"prompts": 4, "group": 8, "batch": 32, "decode_batch": 32},
            "sampler.plan.window.interval": max(1, iterations // 4),
            "optimizer.ema": None,
            "optimizer.schedule": "constant",
            # A reward under check may have any scale.
            "advantage.scale": "group",
            "evaluate.prompts": 24,
            "evaluate.seeds": 2,
        }
    else:
        overrides |= {"evaluate.prompts": 100}
    words = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    return load_recipe("mixgrpo_flash_guard" if task == "images" else "text", words)


def optimise(spec: RewardSpec, task: str, label: str, iterations: int, folder: Path, reporter: Reporter) -> RunFolder:
    """Train for the reward alone, into a new run folder.

    Raises:
        ValueError: the recipe or the folder is wrong.
        RewardError: the reward fails.
    """
    session = start(short_recipe(spec, task, iterations, label), folder)
    session.trainer(reporter).train()
    assert session.run is not None
    return session.run


def read_samples(run: RunFolder) -> list[OptimisedSample]:
    """The held-out samples of a run: each sample of the first evaluation beside the sample with the same prompt and
    seed of the last evaluation.

    Raises:
        ValueError: the run has fewer than two evaluations.
    """
    by_iteration: dict[int, dict[tuple[int, int], dict[str, Any]]] = {}
    for line in run.index.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["phase"] == "eval":
            by_iteration.setdefault(record["iteration"], {})[record["prompt_id"], record["seed"]] = record
    if len(by_iteration) < 2:
        raise ValueError(f"{run.path} has {len(by_iteration)} evaluation(s); two are needed, a first and a last")
    first, last = by_iteration[min(by_iteration)], by_iteration[max(by_iteration)]

    def shown(record: Mapping[str, Any]) -> str:
        return str(run.samples / record["image"]) if "image" in record else str(record["completion"])

    return [
        OptimisedSample(one["prompt"], key[0], shown(one), shown(last[key]), one["rewards"], last[key]["rewards"])
        for key, one in first.items()
        if key in last
    ]


def change_of(before: list[float], after: list[float], prompts: list[int]) -> Change:
    """Means and mean change of paired numbers, with the standard error over prompts; NaN pairs are left out."""
    by_prompt: dict[int, list[tuple[float, float]]] = {}
    for one, other, prompt in zip(before, after, prompts, strict=True):
        if not (math.isnan(one) or math.isnan(other)):
            by_prompt.setdefault(prompt, []).append((one, other))
    if not by_prompt:
        return Change(math.nan, math.nan, math.nan, math.nan)
    means = torch.tensor([[sum(column) / len(rows) for column in zip(*rows)] for rows in by_prompt.values()])
    gains = means[:, 1] - means[:, 0]
    error = (gains.std() / math.sqrt(len(gains))).item() if len(gains) > 1 else math.nan
    return Change(means[:, 0].mean().item(), means[:, 1].mean().item(), gains.mean().item(), error)


def report_change(samples: list[OptimisedSample], task: str, label: str, report: Report) -> None:
    """What optimising did: to the reward, to the yardsticks, and to plain features of the samples."""
    prompts = [sample.prompt_id for sample in samples]
    changes: dict[str, Change] = {}
    for name in samples[0].scores_before:
        sides = ([sample.scores_before[name] for sample in samples], [sample.scores_after[name] for sample in samples])
        before, after = ([math.nan if value is None else value for value in side] for side in sides)
        changes[name] = change_of(before, after, prompts)
    report.tables["optimised"] = {name: change.record() for name, change in changes.items()}
    listed = "; ".join(f"{name} {_told(change)}" for name, change in changes.items())
    right = YARDSTICKS[task][0].label or YARDSTICKS[task][0].name
    own, gold = changes[label], changes.get(right)
    report.add("optimised", NOTE, f"on {len(samples)} held-out samples: {listed}", "", change=own.change)
    if math.isnan(own.change):
        report.add(
            "optimised", WARNING, "no held-out sample has a score both before and after, so its change is not known",
            "The prompts belong to the embedded model; train with prompts to which the reward applies.",
        )  # fmt: skip
    elif math.isnan(own.error):
        report.add(
            "optimised", NOTE, "it applies to one held-out prompt only, so its change has no standard error",
            "Nothing can be said of other prompts.",
        )  # fmt: skip
    elif own.clear and own.change < 0:
        report.add("optimised", WARNING, f"training for it lowered it: {_told(own)}", "Is its sign right?")
    elif not own.clear:
        report.add("optimised", NOTE, "it did not change clearly", "Give the run more iterations (--iterations).")
    elif gold is not None and right != label and gold.clear and gold.change < 0:
        report.add(
            "hacking", WARNING, f"it rose ({_told(own)}) while {right} fell ({_told(gold)})",
            "Look at the samples. If they look worse to you too, list a guard beside the reward, or bound the reward.",
            reward=own.change, gold=gold.change,
        )  # fmt: skip
    features = _features(samples, task)
    told = []
    for name, measure in features.items():
        change = change_of(measure(True), measure(False), prompts)
        report.tables.setdefault("features", {})[name] = change.record()
        if change.clear and abs(change.change) > VISIBLE:
            told.append(f"{name} {_told(change)}")
    report.add("preference", NOTE, f"what changed in the samples: {'; '.join(told) or 'no plain feature clearly'}")


def _told(change: Change) -> str:
    if math.isnan(change.change):
        return "without a score"
    error = ", no standard error" if math.isnan(change.error) else f" ± {change.error:.2g}"
    return f"{change.before:.4g} → {change.after:.4g} ({change.change:+.3g}{error})"


def _features(samples: list[OptimisedSample], task: str) -> dict[str, Callable[[bool], list[float]]]:
    """Plain features: name -> their values before (True) or after (False)."""
    if task == "text":
        return {
            "characters": lambda first: [float(len(s.before if first else s.after)) for s in samples],
            "words": lambda first: [float(len((s.before if first else s.after).split())) for s in samples],
        }
    pictures = {side: [load_picture(Path(s.before if side else s.after)) for s in samples] for side in (True, False)}

    def of(measure: Callable[[Tensor], Tensor]) -> Callable[[bool], list[float]]:
        return lambda first: [measure(picture).item() for picture in pictures[first]]

    return {
        "brightness": of(lambda x: x.mean()),
        "saturation": of(lambda x: (x.amax(0) - x.amin(0)).mean()),
        "contrast": of(lambda x: x.mean(0).std()),
        "detail": of(lambda x: (x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()) / 2),
    }
