"""The race: which runs it asks for, how a learning rate is chosen, and where a gain is reached."""

import dataclasses
import json
import math
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowgrpo.bench.claims.results import Settings, key_of, write_result
from flowgrpo.bench.race import race_runs
from flowgrpo.bench.race.race_report import command, first_place, mean_gain, race, reach, write_race
from flowgrpo.bench.race.race_runs import (
    CHOOSING_SEED,
    COMPUTE,
    DEFAULT,
    GRADIENT_UNITS,
    RACERS,
    RATES,
    SHORT,
    Entry,
    RaceSettings,
    Trial,
    choose,
    compute_of,
    find_entry,
    late_score,
    missing,
    race_recipe,
    standing,
)
from flowgrpo.cli.app import app
from flowgrpo.configs.load import dump_recipe, load_image_recipe, recipe_names
from flowgrpo.configs.schema import Recipe
from tests.bench.made_results import HARDWARE, made

Result = dict[str, Any]
CHOSEN = RATES[1]


@pytest.fixture
def settings(tmp_path: Path) -> RaceSettings:
    return RaceSettings(tmp_path / "results", (0, 1), any_code=True)


def run(scores: list[float], **changed: Any) -> Result:
    return made("awm", scores, **changed)


def store(settings: RaceSettings, entry: Entry, scores: list[float], **changed: Any) -> None:
    """Write a made result where the race looks for the run of an entry."""
    recipe = race_recipe(entry, settings)
    head = {"kind": "race", "label": entry.method, "seed": entry.seed, "key": key_of([recipe])}
    result = run(scores) | head | {"recipes": [dump_recipe(recipe)]} | changed
    write_result(made_folder(settings) / f"{entry.prefix}-{result['key']}.json", result)


def made_folder(settings: Settings) -> Path:
    settings.results.mkdir(parents=True, exist_ok=True)
    return settings.results


def try_short(settings: RaceSettings, method: str = "awm", best: float = CHOSEN) -> None:
    """Results of short runs, with one rate the best."""
    for rate in RATES:
        store(settings, Entry(method, rate, CHOOSING_SEED, "short"), [0.4, 0.4, 0.5 if rate == best else 0.45])


def try_whole(settings: RaceSettings, *ends: float) -> None:
    """Results of whole runs with the smallest rates, whose last score is given."""
    for rate, end in zip(RATES, ends):
        store(settings, Entry("awm", rate, CHOOSING_SEED, "whole"), [0.4, 0.4, end])


def settle(settings: RaceSettings) -> None:
    """All trials, which choose `CHOSEN`."""
    try_short(settings)
    try_whole(settings, 0.45, 0.5)


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [name for name in RACERS if name != DEFAULT])
def test_every_recipe_gets_the_same_compute(method: str, settings: RaceSettings) -> None:
    trials: list[tuple[Trial, float]] = [("", 1.0), ("whole", 1.0), ("short", SHORT)]
    for trial, share in trials:
        recipe = race_recipe(Entry(method, CHOSEN, 0, trial), settings)
        one = compute_of(load_image_recipe(method))
        assert recipe.run.iterations * one == pytest.approx(share * COMPUTE, abs=one)
        assert recipe.optimizer.learning_rate == CHOSEN
        assert recipe.data.heldout == ("scenes:heldout" if trial else "scenes:test")


def test_the_default_runs_as_it_is(settings: RaceSettings) -> None:
    own, raced = load_image_recipe(DEFAULT), race_recipe(Entry(DEFAULT, None, 1), settings)
    assert raced.run.iterations == own.run.iterations
    assert (raced.optimizer, raced.objective, raced.rollout) == (own.optimizer, own.objective, own.rollout)
    assert raced.run.seed == 1


def test_compute_counts_gradients_three_times() -> None:
    recipe = load_image_recipe("diffusion_nft")
    images = recipe.rollout.prompts * recipe.rollout.group
    assert compute_of(recipe) == images * (recipe.sampler.steps + GRADIENT_UNITS * recipe.objective.get("times"))


# -- the order of the runs ---------------------------------------------------------------------------------------------


def test_rates_are_chosen_first_and_then_the_seeds_take_turns(settings: RaceSettings) -> None:
    first = list(missing(settings, [DEFAULT, "awm"]))
    assert [(e.method, e.rate, e.trial) for e in first] == [
        *(("awm", rate, "short") for rate in RATES), (DEFAULT, None, ""), (DEFAULT, None, ""),
    ]  # fmt: skip
    try_short(settings)
    then = list(missing(settings, [DEFAULT, "awm"]))
    assert [(e.method, e.rate, e.trial) for e in then] == [
        ("awm", CHOSEN, "whole"), ("awm", RATES[0], "whole"), (DEFAULT, None, ""), (DEFAULT, None, ""),
    ]  # fmt: skip
    settle(settings)
    later = list(missing(settings, [DEFAULT, "awm"]))
    assert [(e.method, e.rate, e.seed) for e in later] == [
        (DEFAULT, None, 0), ("awm", CHOSEN, 0), (DEFAULT, None, 1), ("awm", CHOSEN, 1),
    ]  # fmt: skip
    for entry in later:
        store(settings, entry, [0.4, 0.5])
    assert not list(missing(settings, [DEFAULT, "awm"]))


def test_the_rate_with_the_best_late_score_is_chosen(settings: RaceSettings) -> None:
    try_short(settings, best=RATES[2])
    assert standing(settings, "awm").rate == RATES[2]
    assert late_score(run([0.4, 0.4, 0.5])) == pytest.approx(0.45)
    # What a run has in its first half does not count.
    assert late_score(run([0.9, 0.4, 0.5])) == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("whole", "rate", "compared"),
    [
        ((), RATES[2], [RATES[2], RATES[1]]),
        ((0.4, 0.45, 0.5), RATES[2], []),
        ((0.4, 0.5, 0.45), RATES[1], []),
        ((0.5, 0.45, 0.4), RATES[0], []),
    ],
)
def test_whole_runs_lower_a_rate_that_is_best_in_short_runs(
    whole: tuple[float, ...], rate: float, compared: list[float], settings: RaceSettings
) -> None:
    try_short(settings, best=RATES[2])
    try_whole(settings, *whole)
    found = standing(settings, "awm")
    assert (found.rate, found.compared) == (rate, compared)


def test_the_next_comparison_waits_for_the_one_before() -> None:
    short = dict(zip(RATES, (0.4, 0.45, 0.5)))
    assert choose(short, {RATES[2]: 0.4}) == (RATES[2], [RATES[1]])
    assert choose(short, {RATES[2]: 0.4, RATES[1]: 0.5}) == (RATES[1], [RATES[0]])
    # The smallest rate has nothing to be compared with.
    assert choose(dict(zip(RATES, (0.5, 0.45, 0.4))), {}) == (RATES[0], [])


def test_a_rate_whose_whole_run_fails_is_not_chosen() -> None:
    short = dict(zip(RATES, (0.4, 0.45, 0.5)))
    assert choose(short, dict.fromkeys(RATES[1:])) == (RATES[1], [RATES[0]])
    assert choose(short, dict.fromkeys(RATES)) == (RATES[0], [])
    assert choose(short, {RATES[2]: 0.1, RATES[1]: None}) == (RATES[2], [])


def test_a_rate_that_fails_is_not_chosen(settings: RaceSettings) -> None:
    try_short(settings)
    store(settings, Entry("awm", CHOSEN, CHOOSING_SEED, "short"), [0.4, 0.4], failed="a gradient is not finite")
    found = standing(settings, "awm")
    assert found.rate in RATES
    assert found.rate != CHOSEN
    assert found.choices[CHOSEN] is None


def test_a_run_that_fails_is_not_made_again(settings: RaceSettings) -> None:
    settle(settings)
    store(settings, Entry("awm", CHOSEN, 0), [0.4, 0.4], failed="a gradient is not finite")
    found = standing(settings, "awm")
    assert (found.runs, found.failed) == ({}, [0])
    assert [entry.seed for entry in missing(settings, ["awm"])] == [1]


def test_no_run_begins_after_the_budget(settings: RaceSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_runs, "measure_entry", lambda *_: pytest.fail("a run began"))
    said: list[str] = []
    race_runs.measure_race(dataclasses.replace(settings, budget=0.0), ["awm"], said.append)
    assert "the budget of 0 h is spent" in said[0]
    assert f"awm, learning rate {RATES[0]:g}, a short run" in said[0]


# -- where a gain is reached -------------------------------------------------------------------------------------------


def test_a_gain_needs_two_evaluations_in_a_row() -> None:
    assert first_place(run([0.4, 0.46, 0.42, 0.48, 0.47]), "iteration", 0.05) == pytest.approx(20 + 10 * 0.03 / 0.06)
    assert first_place(run([0.4, 0.46, 0.42, 0.43, 0.44]), "iteration", 0.05) is None
    # The last evaluation has no other one after it.
    assert first_place(run([0.4, 0.42, 0.46]), "compute", 0.05) == pytest.approx(1000 + 1000 * 0.03 / 0.04)
    assert first_place(run([0.4, 0.4]), "compute", 0.05) is None


def test_a_gain_that_some_runs_miss_has_a_lower_bound() -> None:
    reaches, misses = run([0.25, 0.375, 0.375]), run([0.25, 0.25, 0.25])
    both = reach([reaches, reaches], "compute", 0.125)
    assert both.places is not None
    assert both.places.mean == pytest.approx(1000)
    # With two runs, Student's factor is 12.7.
    assert reach([reaches, reaches], "seconds", 0.125).text() == "10 (2 runs)"
    assert reach([reaches] * 3, "seconds", 0.125).text() == "10 [10, 10]"
    one = reach([reaches, misses], "compute", 0.125)
    assert (one.reached, one.runs, one.places) == (1, 2, None)
    assert one.least == pytest.approx(math.sqrt(1000 * 2000))
    assert one.text() == "over 1.4k (1 of 2 reach it)"
    assert reach([reaches], "seconds", 0.125).text() == "10 (one run)"
    assert reach([], "seconds", 0.125).text() == "–"


def test_a_run_that_failed_does_not_reach_a_gain() -> None:
    reaches, misses = run([0.25, 0.375, 0.375]), run([0.25, 0.25, 0.25])
    found = reach([reaches] * 3, "compute", 0.125, 1)
    assert (found.reached, found.runs, found.places) == (3, 4, None)
    assert found.least == pytest.approx(1000)
    assert found.text() == "over 1.0k (3 of 4 reach it)"
    assert reach([reaches, misses], "seconds", 0.125, 2).text() == "over 14 (1 of 4 reach it)"
    assert reach([], "seconds", 0.125, 2).text() == "– (0 of 2 reach it)"


def test_the_interval_of_places_is_of_their_logarithms() -> None:
    early, late = run([0.25, 0.375, 0.375]), run([0.25, 0.25, 0.25, 0.25, 0.375])
    found = reach([early, late], "iteration", 0.125).places
    assert found is not None
    assert found.mean == pytest.approx(math.sqrt(10 * 40))
    assert found.low * found.high == pytest.approx(found.mean**2)


def test_the_mean_curve_ends_with_the_shortest_run() -> None:
    places, gains = mean_gain([run([0.4, 0.5, 0.6]), run([0.3, 0.3])], "iteration")
    assert places == [0, 10]
    assert gains == pytest.approx([0, 0.05])


# -- the report and real runs ------------------------------------------------------------------------------------------


def test_the_report_has_every_recipe(settings: RaceSettings, tmp_path: Path) -> None:
    try_short(settings)
    for seed, scores in enumerate(([0.4, 0.5, 0.55], [0.4, 0.45, 0.52])):
        store(settings, Entry("awm", CHOSEN, seed), scores)
    page = write_race(settings, [standing(settings, name) for name in (DEFAULT, "awm")], tmp_path)
    row = next(line for line in page.read_text().splitlines() if line.startswith("| `awm`"))
    assert "| 0.0006 | 0, 1 | +0.150, +0.120 | 707 (2 runs) |" in row
    assert "| `default` | as it is | – | – | – | – | – | – |" in page.read_text()
    assert "\nSeeds that have no run yet: `default` 0, 1.\n" in page.read_text()
    # The mean of 0.4, 0.425, 0.45, 0.475 and 0.5. The runs with the other rates end at 0.45.
    assert "| `awm` | 0.425 | 0.450 | 0.425 | – | – | – |" in page.read_text()
    assert "\nWhole runs are missing for the rate of: `awm`.\n" in page.read_text()
    settle(settings)
    figures = json.loads((tmp_path / "race.json").read_text())["recipes"]["awm"]
    assert not figures["settled"]
    assert figures["curves"]["0"]["gold"] == [0.4, 0.5, 0.55]
    assert figures["reach"]["compute"]["0.1"]["reached"] == 2
    store(settings, Entry("awm", CHOSEN, 2), [0.4, 0.4, 0.4])
    three = dataclasses.replace(settings, seeds=(0, 1, 2))
    page = write_race(three, [standing(three, "awm")], tmp_path)
    assert "| `awm` | 0.425 | 0.450 | 0.425 | 0.425 | 0.450 | – |\n" in page.read_text()
    assert "missing" not in page.read_text()
    assert "| 0.0006 | 0, 1, 2 | +0.090 [−0.107, +0.287] | over 1.0k (2 of 3 reach it) |" in page.read_text()
    ElementTree.fromstring((tmp_path / "race.svg").read_text())


def test_a_failed_seed_and_a_rate_that_is_not_chosen_are_in_the_report(settings: RaceSettings, tmp_path: Path) -> None:
    settle(settings)
    store(settings, Entry("awm", CHOSEN, 0), [0.4, 0.5, 0.55])
    store(settings, Entry("awm", CHOSEN, 1), [0.4, 0.4], failed="a gradient is not finite")
    text = write_race(settings, [standing(settings, n) for n in (DEFAULT, "awm", "dgpo")], tmp_path).read_text()
    row = next(line for line in text.splitlines() if line.startswith("| `awm`"))
    assert "| 0; failed: 1 | +0.150 | over 500 (1 of 2 reach it) | over 5 (1 of 2 reach it) |" in row
    assert " A run that failed does not reach the gain, and does not count in the mean.\n" in text
    recipes = json.loads((tmp_path / "race.json").read_text())["recipes"]
    assert {name: figures["settled"] for name, figures in recipes.items()} == {
        DEFAULT: True,
        "awm": True,
        "dgpo": False,
    }
    found = recipes["awm"]["reach"]["compute"]["0.05"]
    assert (found["reached"], found["runs"], found["places"]) == (1, 2, None)
    store(settings, Entry("awm", CHOSEN, 0), [0.4, 0.4], failed="a gradient is not finite")
    text = write_race(settings, [standing(settings, "awm")], tmp_path).read_text()
    assert "| – (0 of 2 reach it) |" in text
    found = json.loads((tmp_path / "race.json").read_text())["recipes"]["awm"]["reach"]["seconds"]["0.1"]
    assert (found["reached"], found["runs"], found["least"]) == (0, 2, None)


def test_the_race_says_where_its_results_come_from(settings: RaceSettings, tmp_path: Path) -> None:
    other_code = "These results come from other code, with an equal recipe: default."
    machines = "Results come from more than one machine or number of threads: compare ratios, not seconds."
    store(settings, Entry(DEFAULT, None, 0), [0.4, 0.5])
    text = write_race(settings, [standing(settings, DEFAULT)], tmp_path).read_text()
    assert other_code not in text
    assert machines not in text
    store(settings, Entry(DEFAULT, None, 1), [0.4, 0.5], key="0123456789", hardware=HARDWARE | {"gpu": "a gpu"})
    text = write_race(settings, [standing(settings, DEFAULT)], tmp_path).read_text()
    assert f"\n{other_code}\n" in text
    assert f"\n{machines}\n" in text


@pytest.mark.parametrize("results", [Path("elsewhere/results"), Path("/data/my results")])
def test_the_command_names_its_results(tmp_path: Path, results: Path) -> None:
    settings = RaceSettings(results)
    text = write_race(settings, [standing(settings, DEFAULT)], tmp_path).read_text()
    assert f"--budget 1 --results {shlex.quote(str(results))}`" in text
    assert shlex.quote(str(results)) in json.loads((tmp_path / "race.json").read_text())["command"]
    assert "--results" not in command(RaceSettings(Path("runs/race")), [])


def test_a_tiny_race_is_run_and_not_run_again(random_pipeline: Path, tmp_path: Path) -> None:
    words = (
        f"model.path={random_pipeline}", "sampler.steps=4", "rollout={prompts: 2, group: 3, batch: 6}",
        "rewards=[{name: jpeg_compressibility}]", "evaluate.prompts=2",
    )  # fmt: skip
    settings = RaceSettings(tmp_path / "results", (0,), 1e-6, words)
    said: list[str] = []
    race(settings, ["diffusion_nft"], tmp_path / "report", said.append)
    found = standing(settings, "diffusion_nft")
    assert set(found.choices) == set(RATES)
    assert not found.compared
    result = find_entry(settings, Entry("diffusion_nft", found.rate, 0))
    assert result is not None
    assert result["hardware"].keys() == HARDWARE.keys()
    assert result["evaluation"]["compute"][-1] > 0
    assert result["evaluation"]["iteration"] == [0, 1, 2]
    said.clear()
    race(settings, ["diffusion_nft"], tmp_path / "report", said.append)
    assert said[0] == "every run of the race has a result"


def test_a_given_rate_needs_no_trial(settings: RaceSettings, tmp_path: Path) -> None:
    given = dataclasses.replace(settings, given=(("awm", 3e-3),))
    assert [entry.prefix for entry in missing(given, ["awm"])] == [
        "race-awm-rate0.003-seed0",
        "race-awm-rate0.003-seed1",
    ]
    assert race_recipe(Entry("awm", 3e-3, 0), given).optimizer.learning_rate == 3e-3
    words = Settings(settings.results, (0, 1), overrides=("awm=0.003", "sampler.steps=4"), any_code=True)
    store(dataclasses.replace(settings, overrides=("sampler.steps=4",)), Entry("awm", 3e-3, 0), [0.4, 0.5, 0.55])
    race(words, ["default"], tmp_path / "report", lambda line: None, only_report=True)
    page = (tmp_path / "report" / "race.md").read_text()
    assert "| `awm` | 0.003 (given) | 0 | +0.150 |" in page
    assert "How the learning rates were chosen" not in page
    assert "`flowgrpo bench race default awm=0.003 sampler.steps=4 --seeds 0,1" in page


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("awm=fast", "awm=fast: the learning rate must be a number above 0, such as awm=0.0006"),
        ("awm=-1", "awm=-1: the learning rate must be a number above 0"),
        ("awm=inf", "awm=inf: the learning rate must be a number above 0"),
        ("default=1e-3", "default=1e-3: default runs with its own learning rate; write default alone"),
    ],
)
def test_a_rate_that_cannot_be_given_is_refused(tmp_path: Path, word: str, message: str) -> None:
    outcome = CliRunner().invoke(app, ["bench", "race", word, "--results", str(tmp_path / "results")])
    assert outcome.exit_code
    assert message in str(outcome.exception) + outcome.output


def test_no_recipe_is_named_like_a_section_of_recipes() -> None:
    assert not set(recipe_names("images")) & set(Recipe.model_fields)


def test_an_unknown_recipe_is_refused(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["bench", "race", "awn", "--results", str(tmp_path / "results")])
    assert outcome.exit_code
    assert "no recipe 'awn' for the race; use" in str(outcome.exception) + outcome.output


@pytest.mark.slow
def test_the_published_table_comes_from_the_committed_results(tmp_path: Path) -> None:
    """A default that changes must not keep the race from finding what it has measured."""
    record = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "race"
    settings = Settings(record / "results", (0, 1, 2), 0.5, any_code=True)
    race(settings, [], tmp_path, lambda text: None, only_report=True)
    made, published = ((folder / "race.md").read_text().splitlines() for folder in (tmp_path, record))
    rows = [line for line in published if line.startswith("| `")]
    assert len(rows) == 21
    assert [line for line in made if line.startswith("| `")] == rows
