"""The runs of the race: every recipe with the same compute, and with its learning rate chosen from the same values.

A published recipe gets as many iterations as fit into `COMPUTE`, and the schedule of its learning rate stretches over
them. Its learning rate is chosen from `RATES` with another seed, on the held-out prompts. Short runs have every rate. A
rate that is best in a short run may be too high for a whole one, so whole runs compare it with the next smaller rate,
and the choice goes down while the smaller rate is better. Then the recipe runs on each seed, and the test prompts have
the figures. So nothing is chosen on the test prompts or on the seeds of the race. The default is the run that the
README shows: its length and its rate stay as they are. The caller may give the rate of a published recipe, for instance
the rate that a race on another pipeline chose; then the recipe needs no run that chooses one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from ...configs.image_recipe import EvaluateConfig
from ...configs.load import load_image_recipe
from ...configs.schema import Recipe
from ...parts.traits import trained
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
"""The short runs that choose a learning rate have this share of the compute."""
CHOOSING_SEED = 1000
EVALUATIONS = 20
CHOOSING_EVALUATIONS = 4
EVALUATED = 301
SCORE = "gold"
TEST, HELD_OUT = "scenes:test", "scenes:heldout"
SETTLED = {
    "run.seed": "give the seeds with --seeds",
    "run.iterations": f"give the length of the runs with --scale; {DEFAULT} runs as it is",
    "run": "leave it out",
    "optimizer.learning_rate": "give a recipe its learning rate as RECIPE=RATE, such as awm=0.0006",
    "data.heldout": f"all figures are of the prompts {TEST}; leave it out",
    **{
        f"evaluate.{key}": "leave it out; evaluate.prompts can be set"
        for key in EvaluateConfig.model_fields
        if key != "prompts"
    },
}
"""Keys that no override of the command may change: each run gets its own values. Key → what to do instead."""
_WAIT = 20.0
Trial = Literal["", "short", "whole"]
_PREFIXES = {"short": "choosing", "whole": "confirming"}
_WORDS = {"short": "a short run", "whole": "a whole run that chooses the rate"}


@dataclass(frozen=True)
class RaceSettings(Settings):
    """The settings of a race.

    Attributes:
        given: pairs of a recipe and its learning rate. The other recipes choose theirs.
    """

    given: tuple[tuple[str, float], ...] = ()

    def rate_of(self, method: str) -> float | None:
        """The learning rate that the caller gives a recipe; None if the recipe chooses one."""
        return dict(self.given).get(method)


@dataclass(frozen=True)
class Entry:
    """One run of the race.

    Attributes:
        method: a recipe of the package.
        rate: its learning rate; None leaves the recipe as it is.
        seed: seed of the run.
        trial: the length of a run that chooses the learning rate; empty for a run of the race.
    """

    method: str
    rate: float | None
    seed: int
    trial: Trial = ""

    @property
    def prefix(self) -> str:
        """The beginning of the name of its result file."""
        rate = "" if self.rate is None else f"-rate{self.rate:g}"
        return f"race-{self.method}{rate}-{_PREFIXES.get(self.trial, f'seed{self.seed}')}"

    @property
    def name(self) -> str:
        """The run in words."""
        rate = "" if self.rate is None else f", learning rate {self.rate:g}"
        return f"{self.method}{rate}, {_WORDS.get(self.trial, f'seed {self.seed}')}"


@dataclass(frozen=True)
class Standing:
    """What is known of one recipe.

    Attributes:
        method: the recipe.
        rate: the learning rate, chosen or given; None for the default, or before the short runs have chosen one.
        given: whether the caller gave the learning rate.
        choices: learning rate → the held-out score of its short run; None for a run that failed.
        whole: the same for whole runs.
        compared: learning rates that need a whole run before the choice is settled; none if it is settled.
        runs: seed → the result of its run.
        failed: seeds whose runs ended with a gradient that is not finite.
    """

    method: str
    rate: float | None
    choices: Mapping[float, float | None] = field(default_factory=dict)
    whole: Mapping[float, float | None] = field(default_factory=dict)
    compared: Sequence[float] = ()
    runs: Mapping[int, Result] = field(default_factory=dict)
    failed: Sequence[int] = ()
    given: bool = False


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
        share = SHORT if entry.trial == "short" else 1.0
        iterations = max(2, round(settings.scale * share * COMPUTE / compute_of(own)))
    every = math.ceil(iterations / (CHOOSING_EVALUATIONS if entry.trial else EVALUATIONS))
    prompts = min(EVALUATED, own.evaluate.prompts or EVALUATED)
    changes += [
        f"data.heldout={HELD_OUT if entry.trial else TEST}",
        f"evaluate={{every: {every}, prompts: {prompts}, take: first, seeds: 1, steps: 10, "
        f"rewards: [{{name: {SCORE}}}]}}",
        f"run={{iterations: {iterations}, seed: {entry.seed}, checkpoint_every: 25, keep: 1, sample_every: {every}}}",
    ]
    return load_image_recipe(entry.method, changes)


def compute_of(recipe: Recipe) -> float:
    """The compute of an iteration as it is planned. Passes for a reference or an old policy are not in it.

    Each noised image counts, also where the images of a prompt are one state at pure noise: the released codes evaluate
    each of them, and the lengths of runs should not change when this package learns to share a state.
    """
    expected = forecast(recipe)
    nfe = nfe_of(recipe, expected)
    states = nfe.theta if trained(recipe) == "images" else nfe.theta_shared
    passes = recipe.optimizer.epochs * GRADIENT_UNITS * states
    return recipe.rollout.prompts * max(counts.images for counts in expected.counts) * (nfe.old_shared + passes)


def find_entry(settings: Settings, entry: Entry) -> Result | None:
    """The result of a run, or None if there is no result."""
    return find(settings, entry.prefix, [race_recipe(entry, settings)])


def measure_entry(settings: Settings, entry: Entry, report: Report) -> bool:
    """Make the result of a run; False if another process is making it."""
    head = {"kind": "race", "label": entry.method, "method": entry.method, "seed": entry.seed, "rate": entry.rate}
    return make_run(settings, entry.prefix, entry.name, race_recipe(entry, settings), head, report)


def standing(settings: RaceSettings, method: str) -> Standing:
    """What the results say of one recipe."""
    rate = settings.rate_of(method)
    given = rate is not None
    choices: dict[float, float | None] = {}
    whole: dict[float, float | None] = {}
    compared: list[float] = []
    if method != DEFAULT and not given:
        choices, whole = trials(settings, method, "short"), trials(settings, method, "whole")
        if len(choices) < len(RATES) or all(score is None for score in choices.values()):
            return Standing(method, None, choices, whole)
        rate, compared = choose(choices, whole)
    results = {seed: find_entry(settings, Entry(method, rate, seed)) for seed in settings.seeds}
    runs = {seed: run for seed, run in results.items() if run is not None and "failed" not in run}
    failed = [seed for seed, run in results.items() if run is not None and "failed" in run]
    return Standing(method, rate, choices, whole, compared, runs, failed, given)


def trials(settings: Settings, method: str, trial: Trial) -> dict[float, float | None]:
    """Learning rate → the held-out score of its run of that length; None for a run that failed."""
    found = {rate: find_entry(settings, Entry(method, rate, CHOOSING_SEED, trial)) for rate in RATES}
    return {rate: None if "failed" in run else late_score(run) for rate, run in found.items() if run is not None}


def choose(short: Mapping[float, float | None], whole: Mapping[float, float | None]) -> tuple[float, list[float]]:
    """The learning rate that trials choose.

    Args:
        short: learning rate → score of its short run, for every rate.
        whole: the same for the whole runs that were made.

    Returns:
        The rate, and the rates whose whole runs are missing before the choice is settled.
    """
    order = sorted(short)
    place = max(range(len(order)), key=lambda k: _or_least(short[order[k]]))
    while place > 0:
        rate, smaller = order[place], order[place - 1]
        if absent := [value for value in (rate, smaller) if value not in whole]:
            return rate, absent
        if whole[rate] is not None and _or_least(whole[rate]) >= _or_least(whole[smaller]):
            break
        place -= 1
    return order[place], []


def _or_least(score: float | None) -> float:
    return -math.inf if score is None else score


def late_score(run: Result) -> float:
    """The mean held-out score of the second half of a run, at equal distances of compute."""
    end = run["evaluation"]["compute"][-1]
    return statistics.fmean(score_at(run, "compute", end * share, SCORE) for share in (0.5, 0.625, 0.75, 0.875, 1.0))


def missing(settings: RaceSettings, methods: Sequence[str]) -> Iterator[Entry]:
    """The runs to make next: first those that choose a rate, then one seed of every recipe after the other."""
    standings = [standing(settings, method) for method in methods]
    for found in standings:
        if found.method != DEFAULT and not found.given:
            for rate in RATES:
                if rate not in found.choices:
                    yield Entry(found.method, rate, CHOOSING_SEED, "short")
    for found in standings:
        for rate in found.compared:
            yield Entry(found.method, rate, CHOOSING_SEED, "whole")
    for seed in settings.seeds:
        for found in standings:
            ready = found.method == DEFAULT or (found.rate is not None and not found.compared)
            if ready and seed not in found.runs and seed not in found.failed:
                yield Entry(found.method, found.rate, seed)


def measure_race(settings: RaceSettings, methods: Sequence[str], report: Report) -> None:
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
