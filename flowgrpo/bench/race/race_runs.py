"""The runs of the race: every recipe with the same compute, and with its learning rate chosen from the same values.

A published recipe gets as many iterations as fit into `COMPUTE`, and its own schedule stretches over them. Its learning
rate is the best of `RATES` in short runs of another seed, on the held-out prompts. Then it runs on each seed, and the
test prompts have the figures. So nothing is chosen on the test prompts or on the seeds of the race. The default is the
run that the README shows: its length and its rate stay as they are.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ...configs.load import load_image_recipe
from ...configs.schema import Recipe
from ...training.planning import forecast, nfe_of
from ..claims.evidence import final, score_at
from ..claims.results import Result, Settings, find
from ..claims.trainings import GRADIENT_UNITS, Report, make_run

DEFAULT = "default"
RACERS = (
    DEFAULT, "flow_grpo", "dance_grpo", "mixgrpo", "mixgrpo_flash", "branchgrpo_mix", "tempflow_grpo", "diffusion_nft",
    "awm", "dgpo", "flow_dpo",
)  # fmt: skip
RATES = (2e-4, 6e-4, 1.8e-3)
COMPUTE = 400_000
"""States of a run, a state with gradients counted as three; about twenty minutes on two cores."""
SHORT = 0.25
"""The runs that choose a learning rate have this share of the compute."""
CHOOSING_SEED = 1000
EVALUATIONS = 20
CHOOSING_EVALUATIONS = 4
EVALUATED = 301
SCORE = "gold"
TEST, HELD_OUT = "scenes:test", "scenes:heldout"
_WAIT = 20.0


@dataclass(frozen=True)
class Entry:
    """One run of the race.

    Attributes:
        method: a recipe of the package.
        rate: its learning rate; None leaves the recipe as it is.
        seed: seed of the run.
        choosing: whether this is a short run that chooses the learning rate.
    """

    method: str
    rate: float | None
    seed: int
    choosing: bool = False

    @property
    def prefix(self) -> str:
        """The beginning of the name of its result file."""
        rate = "" if self.rate is None else f"-rate{self.rate:g}"
        return f"race-{self.method}{rate}-{'choosing' if self.choosing else f'seed{self.seed}'}"

    @property
    def name(self) -> str:
        """The run in words."""
        rate = "" if self.rate is None else f", learning rate {self.rate:g}"
        return f"{self.method}{rate}, {'a short run' if self.choosing else f'seed {self.seed}'}"


@dataclass(frozen=True)
class Standing:
    """What is known of one recipe.

    Attributes:
        method: the recipe.
        rate: the chosen learning rate; None for the default, or before it is chosen.
        choices: learning rate → the held-out score by which it was chosen; None for a run that failed.
        runs: seed → the result of its run.
        failed: seeds whose runs ended with a gradient that is not finite.
    """

    method: str
    rate: float | None
    choices: Mapping[float, float | None] = field(default_factory=dict)
    runs: Mapping[int, Result] = field(default_factory=dict)
    failed: Sequence[int] = ()


@lru_cache(maxsize=1024)
def race_recipe(entry: Entry, settings: Settings) -> Recipe:
    """The recipe of one run, with the length that its compute allows.

    Raises:
        RecipeError: the overrides of the settings do not fit the recipe.
    """
    changes = list(settings.overrides)
    if entry.rate is not None:
        changes.append(f"optimizer.learning_rate={entry.rate:g}")
    own = load_image_recipe(entry.method, changes)
    iterations = own.run.iterations
    if entry.method != DEFAULT:
        share = SHORT if entry.choosing else 1.0
        iterations = max(2, round(settings.scale * share * COMPUTE / compute_of(own)))
    every = math.ceil(iterations / (CHOOSING_EVALUATIONS if entry.choosing else EVALUATIONS))
    prompts = min(EVALUATED, own.evaluate.prompts or EVALUATED)
    changes += [
        f"data.heldout={HELD_OUT if entry.choosing else TEST}",
        f"evaluate={{every: {every}, prompts: {prompts}, seeds: 1, steps: 10, rewards: [{{name: {SCORE}}}]}}",
        f"run={{iterations: {iterations}, seed: {entry.seed}, checkpoint_every: 25, keep: 1, sample_every: {every}}}",
    ]
    return load_image_recipe(entry.method, changes)


def compute_of(recipe: Recipe) -> float:
    """The compute of an iteration as it is planned. Passes for a reference or an old policy are not in it."""
    expected = forecast(recipe)
    nfe = nfe_of(recipe, expected)
    passes = recipe.optimizer.epochs * GRADIENT_UNITS * nfe.theta_shared
    return recipe.rollout.prompts * max(counts.images for counts in expected.counts) * (nfe.old_shared + passes)


def find_entry(settings: Settings, entry: Entry) -> Result | None:
    """The result of a run, or None if there is no result."""
    return find(settings, entry.prefix, [race_recipe(entry, settings)])


def measure_entry(settings: Settings, entry: Entry, report: Report) -> bool:
    """Make the result of a run; False if another process is making it."""
    head = {"kind": "race", "label": entry.method, "method": entry.method, "seed": entry.seed, "rate": entry.rate}
    return make_run(settings, entry.prefix, entry.name, race_recipe(entry, settings), head, report)


def standing(settings: Settings, method: str) -> Standing:
    """What the results say of one recipe."""
    rate, choices = None, {}
    if method != DEFAULT:
        for value in RATES:
            found = find_entry(settings, Entry(method, value, CHOOSING_SEED, choosing=True))
            if found is not None:
                choices[value] = None if "failed" in found else late_score(found)
        known = {value: score for value, score in choices.items() if score is not None}
        if len(choices) < len(RATES) or not known:
            return Standing(method, None, choices)
        rate = max(known, key=lambda value: known[value])
    results = {seed: find_entry(settings, Entry(method, rate, seed)) for seed in settings.seeds}
    runs = {seed: run for seed, run in results.items() if run is not None and "failed" not in run}
    failed = [seed for seed, run in results.items() if run is not None and "failed" in run]
    return Standing(method, rate, choices, runs, failed)


def late_score(run: Result) -> float:
    """The mean held-out score of the second half of a run, at equal distances of compute."""
    end = run["evaluation"]["compute"][-1]
    return statistics.fmean(score_at(run, "compute", end * share, SCORE) for share in (0.5, 0.625, 0.75, 0.875, 1.0))


def missing(settings: Settings, methods: Sequence[str]) -> Iterator[Entry]:
    """The runs to make next: first those that choose a rate, then one seed of every recipe after the other."""
    standings = [standing(settings, method) for method in methods]
    for found in standings:
        if found.method != DEFAULT:
            for rate in RATES:
                if rate not in found.choices:
                    yield Entry(found.method, rate, CHOOSING_SEED, choosing=True)
    for seed in settings.seeds:
        for found in standings:
            ready = found.method == DEFAULT or found.rate is not None
            if ready and seed not in found.runs and seed not in found.failed:
                yield Entry(found.method, found.rate, seed)


def measure_race(settings: Settings, methods: Sequence[str], report: Report) -> None:
    """Make the runs that are missing; a run begins only while the budget lasts."""
    end = time.monotonic() + 3600 * settings.budget
    while todo := list(missing(settings, methods)):
        if time.monotonic() >= end:
            names = "; ".join(entry.name for entry in todo)
            return report(
                f"the budget of {settings.budget:g} h is spent; runs that are missing, first to last: {names}"
            )
        report(f"{len(todo)} runs to make now, at most {(end - time.monotonic()) / 60:.0f} minutes left")
        if not any(measure_entry(settings, entry, report) for entry in todo):
            time.sleep(_WAIT)  # another process makes them all, and further runs may follow from them
    report("every run of the race has a result")


def gain_at_end(run: Result) -> float:
    """The gain of the score over a run."""
    return final(run, SCORE) - run["evaluation"][SCORE][0]
