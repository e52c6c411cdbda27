"""Symptoms of a run that learns nothing, or that has unlearned what it could: said early, and in words.

Everything is told from what the metrics hold, so a run that is resumed goes on where its lines end. A symptom is said
when it has lasted for some iterations, and then again only after it has lasted twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...configs.reward_sections import RewardConfig

NEGLIGIBLE = 1e-6
"""Largest advantage with which nothing is compared; rounding leaves less."""
DIVERGENCE = 1.0
"""`approx_kl` of ratios that no clip keeps near 1: that of a ratio of 3.1, or of 0.16, everywhere."""
FINITE = ("loss", "grad_norm", "ratio/mean", "approx_kl", "kl")
FACTOR = 1000.0
SETTLED = 3
LEAST_PROMPTS = 8
ERRORS, DEVIATIONS = 4.0, 0.5


@dataclass(frozen=True)
class Symptom:
    """Something that should not be.

    Attributes:
        name: in the metrics, after `symptom/`.
        count: iterations, or evaluations, for which it has lasted.
        text: what is seen, what usually causes it, and what to change.
    """

    name: str
    count: int
    text: str

    def __str__(self) -> str:
        return self.text


def marks(symptoms: Iterable[Symptom]) -> dict[str, float | None]:
    """What the metrics say of symptoms."""
    return {f"symptom/{symptom.name}": float(symptom.count) for symptom in symptoms}


class _Lasting:
    """How long something has lasted, and whether it is time to say so."""

    def __init__(self, first: int) -> None:
        self.count, self.due = 0, first

    def step(self, there: bool) -> bool:
        self.count = self.count + 1 if there else 0
        if self.count < self.due:
            return False
        self.due = 2 * self.count
        return True


class Symptoms:
    """Looks at the metrics of a run.

    Args:
        weights: reward -> its weight in training; 0 for those that only record.
        prompts: held-out prompts of an evaluation.
    """

    def __init__(self, weights: Mapping[str, float], prompts: int) -> None:
        self.signs = {name: math.copysign(1.0, weight) for name, weight in weights.items() if weight}
        self.prompts = prompts
        self._lasting = {
            "no_score": _Lasting(5), "no_difference": _Lasting(10), "not_finite": _Lasting(1), "ratio": _Lasting(3),
            "gradient": _Lasting(5), "heldout": _Lasting(1),
        }  # fmt: skip
        self._norms: list[float] = []
        self._start: dict[str, tuple[float, float]] = {}

    def replay(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Remember lines of the metrics, oldest first, without saying anything."""
        for record in records:
            self.evaluation(record)
            if "reward/total" in record:
                self.iteration(record)

    def iteration(self, record: Mapping[str, Any]) -> list[Symptom]:
        """What is to be said of an iteration, by its line of the metrics."""
        scored = any(record.get(f"reward/{name}") is not None for name in self.signs)
        compared = (record.get("advantage/largest") or 0.0) > NEGLIGIBLE
        lost = [name for name in FINITE if name in record and record[name] is None]
        found = {
            "no_score": "" if scored else _no_score(self.signs),
            "no_difference": "" if compared or not scored else NO_DIFFERENCE,
            "not_finite": _not_finite(lost) if compared and lost else "",
            "ratio": _ratio(record) if (record.get("approx_kl") or 0.0) > DIVERGENCE else "",
            "gradient": self._gradient(record.get("grad_norm")) if compared else "",
        }
        return self._said(found, "iterations")

    def evaluation(self, record: Mapping[str, Any]) -> list[Symptom]:
        """What is to be said of an evaluation, by its line of the metrics; nothing of a line without one."""
        means = {
            name.removeprefix("eval/"): (float(value), float(error))
            for name, value in record.items()
            if name.startswith("eval/") and value is not None
            and (error := record.get(f"eval_error/{name.removeprefix('eval/')}")) is not None
        }  # fmt: skip
        if not means or self.prompts < LEAST_PROMPTS:
            return []
        # Where none of them is trained for, all are taken to be better the higher they are.
        signs = {name: self.signs[name] for name in means if name in self.signs} or dict.fromkeys(means, 1.0)
        fallen, risen = [], False
        for name, sign in signs.items():
            mean, error = means[name]
            first, first_error = self._start.setdefault(name, (mean, error))
            change, unit = sign * (mean - first), math.hypot(error, first_error)
            # In units of the standard error, and of the deviation between prompts, which is its √prompts-fold.
            if -change > unit * max(ERRORS, DEVIATIONS * math.sqrt(self.prompts / 2)):
                fallen.append(f"{name} went from {first:.4g} ± {first_error:.2g} to {mean:.4g} ± {error:.2g}")
            risen |= change > 2 * unit
        return self._said({"heldout": "" if risen or not fallen else _heldout(fallen)}, "evaluations")

    def _gradient(self, norm: float | None) -> str:
        if norm is None:
            return ""
        if len(self._norms) < SETTLED:
            self._norms += [norm] if norm > 0 else []
            return ""
        usual = median(self._norms)
        if usual / FACTOR <= norm <= usual * FACTOR:
            return ""
        return GRADIENT.format(norm=norm, usual=usual, how="vanished" if norm < usual else "grown beyond all measure")

    def _said(self, found: Mapping[str, str], unit: str) -> list[Symptom]:
        said = []
        for name, text in found.items():
            lasting = self._lasting[name]
            if lasting.step(bool(text)):
                since = f" (for {lasting.count} {unit})" if lasting.count > 1 else ""
                seen, _, rest = text.partition(": ")
                said.append(Symptom(name, lasting.count, f"{seen}{since}: {rest}"))
        return said


NO_DIFFERENCE = (
    "no reward tells two samples of a group apart, so nothing is learned: the task is too hard or too easy, a reward "
    "gives one value to everything, or the model makes one thing of every prompt, as after too high a learning rate. "
    "Look at the samples; use a reward with degrees, other prompts, a larger rollout.group, or a lower "
    "optimizer.learning_rate"
)
GRADIENT = (
    "the gradient has {how}, to {norm:.2g} from {usual:.2g} at the beginning: mostly the learning rate is too high and "
    "the weights are where nothing makes the samples better. Compare the samples with those of the beginning; start "
    "again with a lower optimizer.learning_rate or optimizer.max_grad_norm"
)


def symptoms_of(rewards: Sequence[RewardConfig], names: Sequence[str], prompts: int) -> Symptoms:
    """What looks at the metrics of a run.

    Args:
        rewards: of the recipe.
        names: under which they are reported.
        prompts: held-out prompts of an evaluation.
    """
    return Symptoms(
        {name: reward.weight if reward.at_least is None else 1.0 for reward, name in zip(rewards, names)}, prompts
    )


def _no_score(names: Iterable[str]) -> str:
    return (
        f"no reward ({', '.join(names)}) has scored any sample, so nothing is learned: it returns NaN or None for all "
        "of them, as where a column of the prompt file is empty or an answer cannot be read. Try the reward on a saved "
        "sample, with `flowgrpo rewards check`"
    )


def _not_finite(names: Iterable[str]) -> str:
    return (
        f"{', '.join(names)} is not finite: numbers have grown beyond all measure. Lower optimizer.learning_rate, use "
        "fewer optimizer.updates, or model.dtype float32 or bfloat16"
    )


def _ratio(record: Mapping[str, Any]) -> str:
    return (
        f"the policy moves far within an iteration, approx_kl {record['approx_kl']:.2g}, so most of an update follows "
        "samples of another policy: the learning rate or the number of updates is too high. Lower "
        "optimizer.learning_rate, optimizer.updates or optimizer.epochs"
    )


def _heldout(fallen: Iterable[str]) -> str:
    return (
        f"held-out {', '.join(fallen)}, far below where it began: mostly the learning rate is too high; else the "
        "reward is being gamed. Look at the pictures or completions of the evaluation; lower "
        "optimizer.learning_rate, add a penalty (penalties.kl.weight=0.005), and begin again from before the fall"
    )
