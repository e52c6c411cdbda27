"""Extension `judges`: credit only for samples that satisfy all judges."""

import math
from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.extensions.extension import Extensions
from tests.training.text_runs import trainer_of

VARIED = """

def varied(completions, prompts):
    return [float(len(set(text)) % 2) for text in completions]
"""


def test_a_run_learns_from_satisfying_samples_alone(small_text: list[str], tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(file.read_text() + VARIED)
    judges = f"{{name: digit_share, label: digits, weight: 0.0}}, {{name: '{file}:varied', weight: 0.0}}"
    lines = [*small_text, f"rewards=[{{name: '{file}:nines'}}, {judges}]"]
    plain = trainer_of(lines, tmp_path / "plain")
    _, everyone, _ = plain._compared(plain._sampled(0))
    values = everyone.scores.values
    good = (values[:, 1] >= 0.1) & (values[:, 2] >= 1.0)
    assert 0 < int(good.sum()) < len(good)

    trainer = trainer_of(
        [*lines, "extensions=[{name: judges, at_least: {digits: 0.1, varied: 1.0}, scale: 0.5}]"], tmp_path / "run"
    )
    _, again, advantages = trainer._compared(trainer._sampled(0))
    assert torch.equal(again.scores.values, values)
    for row, value in enumerate(advantages.tolist()):
        mean = float(values[again.groups == again.groups[row], 0].double().mean())
        expected = 1 / (1 + math.exp((mean - float(values[row, 0])) / 0.5)) if good[row] else 0.0
        assert value == pytest.approx(expected, abs=1e-6)
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["judges/satisfied"] == pytest.approx(float(good.float().mean()))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{name: judges, at_least: {taste: 1}}", "extension judges asks reward 'taste'; the rewards are answer"),
        ("{name: judges, at_least: {}}", "extension judges names no judge"),
        ("{name: judges, at_least: {answer: 1}, keep: some}", "keep"),
        ("judges", "at_least"),
        ("{name: judges, at_least: {answer: .nan}}", "at_least.answer"),
        ("{name: judges, at_least: {answer: true}}", "at_least.answer"),
    ],
)
def test_what_cannot_judge_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("text", [f"extensions=[{line}]"])


def test_judges_stand_before_nothing_that_makes_advantages() -> None:
    lines = ["rewards=[{name: answer}, {name: digit_share, at_least: 0.5}]"]
    with pytest.raises(ValueError, match="replaces the advantages within a group, and extension multipliers finds"):
        load_recipe("text", [*lines, "extensions=[multipliers, {name: judges, at_least: {digit_share: 0.5}}]"])
    with pytest.raises(ValueError, match="extension judges changes the advantages of samples"):
        load_recipe("text", ["credit=prefix", "advantage=null", "extensions=[{name: judges, at_least: {answer: 1}}]"])
    recipe = load_recipe("text", ["extensions=[{name: judges, at_least: {answer: 1}, keep: best}]"])
    assert Extensions.of(recipe, ["answer"], ["answer"]).each["judges"].best
