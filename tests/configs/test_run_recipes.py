"""Since when the evaluations of a run have measured the same."""

from pathlib import Path

import pytest

from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.configs.run_recipes import measured_alike_since, recipes_of


def keep(run: Path, iteration: int, *words: str) -> None:
    folder = run / "recipes" / f"iter-{iteration:06d}"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_recipe(load_recipe("default", words)))


def test_a_run_that_has_not_changed_measures_the_same_from_the_start(tmp_path: Path) -> None:
    assert measured_alike_since(tmp_path) == 0
    assert list(recipes_of(tmp_path)) == []


@pytest.mark.parametrize(
    ("change", "since"),
    [
        ("evaluate.steps=20", 30),
        ("evaluate.seeds=3", 30),
        ("evaluate.prompts=40", 30),
        ("evaluate.rewards=[{name: gold, options: {dense: true}, label: gold}]", 30),
        ("evaluate.every=7", 0),
        ("evaluate.quick=null", 0),
        ("evaluate.results=last", 0),
        ("run.iterations=500", 0),
    ],
)
def test_only_what_scores_depend_on_begins_a_new_measure(change: str, since: int, tmp_path: Path) -> None:
    keep(tmp_path, 0)
    keep(tmp_path, 30, change)
    keep(tmp_path, 60, change, "run.keep=3")
    assert measured_alike_since(tmp_path) == since
    assert measured_alike_since(tmp_path, 30) == since
    assert measured_alike_since(tmp_path, 29) == 0


def test_a_measure_that_comes_back_does_not_join_what_was_before(tmp_path: Path) -> None:
    keep(tmp_path, 0)
    keep(tmp_path, 30, "evaluate.steps=20")
    keep(tmp_path, 60)
    assert measured_alike_since(tmp_path) == 60
    assert measured_alike_since(tmp_path, 59) == 30


def test_a_key_that_an_older_version_did_not_write_changes_nothing(tmp_path: Path) -> None:
    keep(tmp_path, 0)
    keep(tmp_path, 30)
    older = tmp_path / "recipes" / "iter-000000" / "config.yaml"
    older.write_text(older.read_text().replace("  take: spread\n", ""))
    assert measured_alike_since(tmp_path) == 0


def test_a_key_that_an_older_version_did_not_write_had_its_default(tmp_path: Path) -> None:
    keep(tmp_path, 0)
    keep(tmp_path, 30, "evaluate.call={guidance_scale: 3.0}")
    older = tmp_path / "recipes" / "iter-000000" / "config.yaml"
    older.write_text(older.read_text().replace("  call: {}\n", ""))
    assert "\n  call:" not in older.read_text().partition("evaluate:")[2]
    assert measured_alike_since(tmp_path) == 30
