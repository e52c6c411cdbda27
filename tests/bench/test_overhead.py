"""`flowgrpo bench overhead`: the bare calls are the calls of an iteration."""

from pathlib import Path

import pytest

from flowgrpo.bench.measures import _trainer
from flowgrpo.bench.overhead import _calls, _spread, overhead
from flowgrpo.configs.load import load_image_recipe


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_bare_calls_have_all_states_of_an_iteration(small: list[str], epochs: int, tmp_path: Path) -> None:
    """Without gradients the states of the rollout, and once an epoch those of the reference and the trained ones."""
    words = [*small, f"optimizer.epochs={epochs}", "penalties=[{name: kl, weight: 0.1}]"]
    recipe = load_image_recipe("mixgrpo_flash_guard", words)
    trainer = _trainer(recipe, tmp_path / "run")
    counts, prompts = trainer.task.plan_for(1).counts(), recipe.rollout.prompts  # type: ignore[attr-defined]
    states = dict.fromkeys((True, False), 0)
    for call in _calls(trainer, 1):
        states[call.graded] += len(call.kwargs["hidden_states"])
    assert states[True] == epochs * prompts * counts.trained_states
    assert states[False] == prompts * (counts.evaluations + epochs * counts.trained_states)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixgrpo_flash_guard", "default"])
def test_a_recipe_is_measured(name: str, small: list[str], tmp_path: Path) -> None:
    words = [word for word in small if name != "default" or not word.startswith("sampler")]
    lines: list[str] = []
    found = overhead(load_image_recipe(name, words), tmp_path / "run", lines.append, repeats=3)
    assert found["ratio"] > 0
    assert sum(map(len, found["pairs"].values())) == 3
    assert sum(found["shares"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize("length", [1, 2, 30])
def test_only_iterations_of_the_run_are_measured(length: int) -> None:
    found = _spread(40, length)
    assert set(found) == set(range(min(1, length - 1), length))
