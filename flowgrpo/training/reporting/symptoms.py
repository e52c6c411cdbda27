"""Symptoms of a run that learns nothing, or that loses what it could do. They are reported early, in words.

Symptoms follow from the metrics alone, so a resumed run continues where its lines end. A symptom is reported when it
has lasted for some iterations. It is reported again only after it has lasted twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...configs.coefficient_schedules import recipe_at
from ...configs.schema import AnyRecipe
from ...parts.traits import compares_rewards

NEGLIGIBLE = 1e-6
"""A smaller largest advantage means that nothing is compared; rounding leaves advantages below this bound."""
DIVERGENCE = 1.0
"""`approx_kl` of ratios that no clip keeps near 1: the value if all ratios are 3.1, or if all are 0.16."""
FINITE = ("loss", "grad_norm", "ratio/mean", "approx_kl", "kl")
FACTOR = 1000.0
SETTLED = 3
LEAST_PROMPTS = 8
FAR, ERRORS, DEVIATIONS = 3.0, 4.0, 0.5
"""A fall in standard errors that has to last, one that is told at once, and the least one in standard deviations."""
NEARLY_ALL = 0.95
"""Share of completions that are cut at the longest length."""
EXTREME = 3.0
"""`approx_kl` that is reported at once: no clip and no single unlucky batch explains it."""
KNOWN = 25
"""Number of iterations whose standard errors say how much the mean reward of an iteration varies with its prompts."""


@dataclass(frozen=True)
class Symptom:
    """Something that a healthy run does not show.

    Attributes:
        name: in the metrics, after `symptom/`.
        count: iterations or evaluations for which the symptom has lasted.
        text: what is seen, the usual cause, and what to change.
    """

    name: str
    count: int
    text: str

    def __str__(self) -> str:
        return self.text


def marks(symptoms: Iterable[Symptom]) -> dict[str, float | None]:
    """The metrics of symptoms."""
    return {f"symptom/{symptom.name}": float(symptom.count) for symptom in symptoms}


class _Lasting:
    """How long a symptom has lasted, and whether it is due to be reported."""

    def __init__(self, first: int) -> None:
        self.count, self.due, self.said = 0, first, False

    def step(self, there: bool, at_once: bool) -> bool:
        """Count one more iteration; `at_once` reports a symptom for the first time before it is due."""
        self.count = self.count + 1 if there else 0
        if not there or (self.count < self.due and (self.said or not at_once)):
            return False
        self.due, self.said = 2 * self.count, True
        return True


class Symptoms:
    """Finds symptoms in the metrics of a run.

    Args:
        weights: reward -> its weight in training; 0 for a reward that is only recorded.
        prompts: held-out prompts of an evaluation.
        rewarded: whether rewards enter the loss. If not, it does not matter that they tell no samples apart.
    """

    def __init__(self, weights: Mapping[str, float], prompts: int, rewarded: bool = True) -> None:
        self.rewarded = rewarded
        self.signs = {name: math.copysign(1.0, weight) for name, weight in weights.items() if weight}
        self.prompts = prompts
        self._lasting = {
            "no_score": _Lasting(5), "no_difference": _Lasting(10), "not_finite": _Lasting(1), "ratio": _Lasting(3),
            "gradient": _Lasting(5), "reward": _Lasting(5), "heldout": _Lasting(2), "cut": _Lasting(5),
        }  # fmt: skip
        self._ended = False
        self._norms: list[float] = []
        self._start: dict[str, tuple[float, float]] = {}
        self._first: dict[str, tuple[float, float]] = {}
        self._errors: dict[str, list[float]] = {}

    def replay(self, records: Iterable[Mapping[str, Any]], since: int = 0) -> None:
        """Read lines of the metrics, oldest first, without reporting anything.

        Args:
            records: the lines.
            since: evaluations before this iteration do not count, because they have measured something else.
        """
        for record in records:
            if record["iteration"] >= since:
                self.evaluation(record)
            if "reward/total" in record:
                self.iteration(record)

    def iteration(self, record: Mapping[str, Any]) -> list[Symptom]:
        """The symptoms to report after an iteration, from its line of the metrics."""
        scored = not self.rewarded or any(record.get(f"reward/{name}") is not None for name in self.signs)
        # Selections may leave out all samples, also where rewards have no part in the loss.
        none = record.get("loss", 0.0) is None and record.get("grad_norm") == 0.0
        compared = not none if not self.rewarded else (record.get("advantage/largest") or 0.0) > NEGLIGIBLE
        lost = [name for name in FINITE if name in record and record[name] is None]
        # A model that has learned to write on and on could once end.
        self._ended |= (record.get("truncated") or 0.0) < NEARLY_ALL
        found = {
            "no_score": "" if scored else _no_score(self.signs),
            "no_difference": "" if compared or not scored else NO_DIFFERENCE,
            "not_finite": _not_finite(lost) if compared and lost else "",
            "ratio": _ratio(record) if (record.get("approx_kl") or 0.0) > DIVERGENCE else "",
            "gradient": self._gradient(record.get("grad_norm")) if compared else "",
            "reward": self._reward(record),
            "cut": "" if self._ended else CUT,
        }
        extreme = (record.get("approx_kl") or 0.0) > EXTREME
        return self._said(found, "iterations", ["ratio"] if extreme else [])

    def evaluation(self, record: Mapping[str, Any]) -> list[Symptom]:
        """The symptoms to report after an evaluation, from its line of the metrics; none for a line without one."""
        means = _means(record, "eval")
        if not means or self.prompts < LEAST_PROMPTS:
            return []
        # The limit is in standard errors, and in standard deviations between prompts, which are √prompts as large.
        least = DEVIATIONS * math.sqrt(self.prompts / 2)
        falls = self._falls(means, self._start)
        fallen = [text for far, text in falls if far > max(FAR, least)]
        at_once = any(far > max(ERRORS, least) for far, _ in falls)
        found = {"heldout": _heldout(fallen) if fallen else ""}
        return self._said(found, "evaluations", ["heldout"] if at_once else [])

    def _reward(self, record: Mapping[str, Any]) -> str:
        """Whether a trained reward is far below its mean in the first iteration, whose samples no update has changed.

        Each iteration has other prompts, and maybe few. So what its mean varies by is asked of many iterations.
        """
        means = _means(record, "reward")
        for name, (_, error) in means.items():
            known = self._errors.setdefault(name, [])
            known += [error] if len(known) < KNOWN else []
        usual = {name: max(error, median(self._errors[name])) for name, (_, error) in means.items()}
        trained = {name: mean for name, mean in means.items() if name in self.signs}
        fallen = [text for far, text in self._falls(trained, self._first, usual) if far > ERRORS]
        return REWARD.format(fallen=", ".join(fallen)) if fallen else ""

    def _falls(
        self,
        means: Mapping[str, tuple[float, float]],
        start: dict[str, tuple[float, float]],
        usual: Mapping[str, float] | None = None,
    ) -> list[tuple[float, str]]:
        """How far below its first value each reward is, in standard errors, in words too; none if another has risen.

        Args:
            means: reward -> mean and standard error.
            start: reward -> its first mean and standard error; new rewards are added.
            usual: reward -> the standard error of both means; by default the error of each.
        """
        # If no reward here is trained for, a higher value of each counts as better.
        signs = {name: self.signs[name] for name in means if name in self.signs} or dict.fromkeys(means, 1.0)
        found, risen = [], False
        for name, sign in signs.items():
            mean, error = means[name]
            first, first_error = start.setdefault(name, (mean, error))
            both = (error, first_error) if usual is None else (usual[name], usual[name])
            change, unit = sign * (mean - first), math.hypot(*both)
            text = f"{name} went from {first:.4g} ± {first_error:.2g} to {mean:.4g} ± {error:.2g}"
            found += [(-change / unit if unit else math.inf, text)] if change < 0 else []
            risen |= change > 2 * unit
        return [] if risen else found

    def _gradient(self, norm: float | None) -> str:
        if norm is None:
            return ""
        if len(self._norms) < SETTLED:
            self._norms += [norm] if norm > 0 else []
            return ""
        usual = median(self._norms)
        if usual / FACTOR <= norm <= usual * FACTOR:
            return ""
        return GRADIENT.format(norm=norm, usual=usual, how="vanished" if norm < usual else "exploded")

    def _said(self, found: Mapping[str, str], unit: str, at_once: Collection[str]) -> list[Symptom]:
        said = []
        for name, text in found.items():
            lasting = self._lasting[name]
            if lasting.step(bool(text), name in at_once):
                since = f" (for {lasting.count} {unit})" if lasting.count > 1 else ""
                seen, _, rest = text.partition(": ")
                said.append(Symptom(name, lasting.count, f"{seen}{since}: {rest}"))
        return said


NO_DIFFERENCE = (
    "no reward tells two samples of a group apart, so nothing is learned: the task is too hard or too easy, a reward "
    "gives all samples the same value, or the model makes the same sample of every prompt, as after too high a "
    "learning rate. Look at the samples; use a reward with degrees, other prompts, a larger rollout.group, or a lower "
    "optimizer.learning_rate"
)
CUT = (
    "nearly all completions so far were cut at the longest length: generation.max_tokens is too small for what the "
    "model writes, or the model never ends. Write a larger number; recipe `text` has 6 tokens, for the embedded "
    "arithmetic"
)
GRADIENT = (
    "the gradient has {how}, to {norm:.2g} from {usual:.2g} at the beginning: usually the learning rate is too high, "
    "and the weights have reached a place where no small change makes the samples better. Compare the samples with the "
    "first samples of the run; start again with a lower optimizer.learning_rate or optimizer.max_grad_norm"
)


REWARD = (
    "the reward of training samples is far below the first iteration, {fallen}: usually the learning rate is too high. "
    "Look at the samples; begin again with a lower optimizer.learning_rate or optimizer.max_grad_norm. An extension "
    "that chooses harder prompts lowers the reward as well"
)


def _means(record: Mapping[str, Any], kind: str) -> dict[str, tuple[float, float]]:
    """The means of a kind, and their standard errors, where a record has both."""
    names = [name.removeprefix(f"{kind}/") for name in record if name.startswith(f"{kind}/")]
    return {
        name: (float(mean), float(error))
        for name in names
        if (mean := record[f"{kind}/{name}"]) is not None and (error := record.get(f"{kind}_error/{name}")) is not None
    }


def symptoms_of(recipe: AnyRecipe, names: Sequence[str], prompts: int) -> Symptoms:
    """The `Symptoms` of a run.

    Args:
        recipe: of the run.
        names: the names under which the rewards are reported.
        prompts: held-out prompts of an evaluation.
    """
    # A reward that a schedule leads to 0 may fall.
    last = recipe_at(recipe, recipe.run.iterations).rewards
    weights = {name: one.weight if one.at_least is None else 1.0 for one, name in zip(last, names)}
    return Symptoms(weights, prompts, compares_rewards(recipe))


def _no_score(names: Iterable[str]) -> str:
    return (
        f"no reward ({', '.join(names)}) has scored any sample, so nothing is learned: all values are NaN or None, as "
        "when a column of the prompt file is empty or an answer cannot be read. Try the reward on a saved sample, with "
        "`flowgrpo rewards check`"
    )


def _not_finite(names: Iterable[str]) -> str:
    return (
        f"{', '.join(names)} is not finite: numbers have overflowed. Lower optimizer.learning_rate, use fewer "
        "optimizer.updates, or use model.dtype float32 or bfloat16"
    )


def _ratio(record: Mapping[str, Any]) -> str:
    return (
        f"the policy moves far within an iteration, approx_kl {record['approx_kl']:.2g}, so most of an update follows "
        "samples of another policy: the learning rate or the number of updates is too high. Lower "
        "optimizer.learning_rate, optimizer.updates or optimizer.epochs"
    )


def _heldout(fallen: Iterable[str]) -> str:
    return (
        f"held-out {', '.join(fallen)}, far below its first value: usually the learning rate is too high, or the "
        "policy exploits the reward. Look at the pictures or completions of the evaluation; lower "
        "optimizer.learning_rate, add a penalty (penalties.kl.weight=0.005), and begin again from before the fall"
    )
