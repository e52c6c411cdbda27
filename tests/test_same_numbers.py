"""The runs of `same_numbers.py`: each names options that exist, and passes the check before a run."""

from pathlib import Path

import pytest
import yaml

from flowgrpo.configs.load import load_recipe, recipe_names
from flowgrpo.training.checking import check
from tests.same_numbers import runs, write_inputs

LISTED = yaml.safe_load(Path(__file__).with_name("same_numbers.yaml").read_text(encoding="utf-8"))
RUNS = runs()


def test_there_is_a_run_of_each_recipe_and_of_each_variant() -> None:
    recipes = {*recipe_names()}
    variants = {name for name in LISTED if not name.startswith(".")}
    assert not recipes & variants
    assert len(variants) > 50
    assert RUNS.keys() >= recipes | variants
    assert set(LISTED[".own"]) <= recipes


@pytest.mark.parametrize("name", RUNS)
def test_a_run_passes_the_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe, words, _ = RUNS[name]
    assert check(load_recipe(recipe, words)).texts("fault", "needed") == []
