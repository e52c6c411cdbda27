"""A behaviour is rewarded where the samples of its group that show it did better."""

import math
from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.core.combination import contrastive_signs
from tests.training.text_runs import trainer_of

NAN = math.nan


def test_signs_by_hand() -> None:
    """Group 0: 1 and 0 with, 0 without, so 0.5 better. Group 1: 0 with, 1 without. Group 2: equal. Group 3: all."""
    shown = torch.tensor([1.0, 1, 0, 1, 0, 1, 0, 1, 1])
    outcome = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 0])
    groups = [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert contrastive_signs(shown, outcome, groups).tolist() == [1, 1, 0, -1, 0, 0, 0, 0, 0]
    assert contrastive_signs(shown, outcome, groups, margin=0.5).tolist() == [1, 1, 0, -1, 0, 0, 0, 0, 0]
    assert contrastive_signs(shown, outcome, groups, margin=0.6).tolist() == [0, 0, 0, -1, 0, 0, 0, 0, 0]


def test_unknown_rows_are_left_out_of_the_means() -> None:
    shown = torch.tensor([1.0, 1, 0, NAN])
    assert contrastive_signs(shown, torch.tensor([0.2, NAN, 0.1, 0.9]), [0] * 4)[:3].tolist() == [1, 1, 0]
    assert contrastive_signs(shown, torch.tensor([0.2, NAN, 0.1, 0.9]), [0] * 4)[3].isnan()
    assert contrastive_signs(shown, torch.tensor([NAN, NAN, 0.1, 0.9]), [0] * 4)[:3].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        contrastive_signs(torch.tensor([0.5]), torch.tensor([1.0]), [0])
    with pytest.raises(ValueError, match="use 0 or more"):
        contrastive_signs(shown, shown, [0] * 4, margin=-0.1)


def test_a_run_masks_the_reward_of_the_behaviour(small_text: list[str], tmp_path: Path) -> None:
    """The behaviour is a long completion, the outcome is the share of digits; both are read again by hand."""
    two = "rewards=[{name: digit_share}, {name: length, label: long, options: {limit: 2, buffer: 2}}]"
    extension = "extensions=[{name: contrast, reward: long, sub_score: length, at_least: 4, outcome: digit_share}]"
    trainer = trainer_of(small_text, tmp_path / "run", two, extension)
    rows, experience = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, experience)
    expected, long = [], [len(text) >= 4 for text in experience.samples]
    for k, group in enumerate(experience.prompt_of_sample):
        mates = [j for j, other in enumerate(experience.prompt_of_sample) if other == group]
        sides = [[float(scores.values[j, 0]) for j in mates if long[j] == side] for side in (True, False)]
        gap = sum(sides[0]) / len(sides[0]) - sum(sides[1]) / len(sides[1]) if all(sides) else 0.0
        expected.append(float(long[k]) * ((gap > 0) - (gap < 0)))
    assert {1.0, -1.0} & set(expected)
    record = trainer.iterate(0)
    assert record["reward/long"] == pytest.approx(sum(expected) / len(expected))
    assert record["ratio/first_error"] == 0.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("reward: digit_share, outcome: other", r"\(outcome\) asks reward 'other'"),
        ("reward: answer, outcome: answer", "name another reward as outcome"),
        (
            "reward: answer, outcome: digit_share}, {name: contrast, reward: answer, outcome: digit_share, margin: 0.5",
            "has contrast 2 times for reward answer",
        ),
    ],
)
def test_faults_are_named(options: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_recipe(
            "text", ["rewards=[{name: answer}, {name: digit_share}]", f"extensions=[{{name: contrast, {options}}}]"]
        )
