"""A budget of tokens that shrinks during a run."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.core.advantages import group_advantages
from tests.training.text_runs import trainer_of


def test_the_length_counts_among_the_rewards(small_text: list[str], tmp_path: Path) -> None:
    """The advantages come from the reward plus 2 max(0, 1 - |n - 4| / 4), and later of a budget of 2."""
    lines = ["extensions=[{name: tightening, start: 4, factor: 0.5, every: 2, weight: 2.0}]"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    for iteration, budget in ((0, 4), (1, 4), (2, 2)):
        rows, e = trainer.collect(iteration)
        scores = trainer.score(trainer.rewards, rows, e)
        found = trainer.advantages(scores, e, rows)
        near = [max(0.0, 1 - abs(n - budget) / budget) for n in e.lengths.tolist()]
        wanted = group_advantages(scores.values[:, 0] + 2 * torch.tensor(near), e.groups)
        assert torch.allclose(found, wanted, atol=1e-6)
        record = trainer.extensions.each["tightening"].record()
        assert record["length_budget"] == budget
        assert record["length_reward"] == pytest.approx(sum(near) / len(near))


def test_a_run(small_text: list[str], tmp_path: Path) -> None:
    record = trainer_of(small_text, tmp_path / "run", "extensions=[{name: tightening, start: 4}]").iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["length_budget"] == 4


@pytest.mark.parametrize(
    ("base", "lines", "message"),
    [
        ("mixgrpo_flash_guard", [], "counts the tokens of completions"),
        ("text", ["advantage=beta"], "use advantage group"),
        ("text", ["advantage.baseline=loo"], "use advantage.baseline mean"),
        ("text", ["credit=prefix", "advantage=null"], "use credit leaf"),
        (
            "text",
            ["rewards=[{name: answer}, {name: length, options: {limit: 9}, at_least: 0.5}]"],
            "leave out at_least",
        ),
    ],
)
def test_what_does_not_fit_is_refused(base: str, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(base, ["extensions=[{name: tightening}]", *lines])
