"""The weight of a reward follows a schedule over the run."""

from pathlib import Path

import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.extensions.reward_schedule import scheduled_weight
from tests.training.text_runs import trainer_of

BOUNDED = "[{name: answer}, {name: digit_share, at_least: 0.5}]"


@pytest.mark.parametrize(
    ("shape", "weights"),
    [
        # From 0.5 to 0: shares of the way are 0, 1/4, 1/2, 3/4 and 1. For the cosine, the middle shares are
        # (1 - cos(pi/4)) / 2 = 0.1464, 1/2 and 0.8536.
        ("linear", [0.5, 0.375, 0.25, 0.125, 0.0]),
        ("cosine", [0.5, 0.4268, 0.25, 0.0732, 0.0]),
        ("steps", [0.5, 0.5, 0.25, 0.0, 0.0]),
    ],
)
def test_weights_by_hand(shape: str, weights: list[float]) -> None:
    found = [scheduled_weight(0.5, 0.0, k / 4, shape=shape, levels=3) for k in range(5)]  # type: ignore[arg-type]
    assert found == pytest.approx(weights, abs=5e-5)


def test_a_run_trains_with_the_weight_of_its_iteration(small_text: list[str], tmp_path: Path) -> None:
    """The process reward counts twice as much as the outcome at first, and not at all from iteration 2 on."""
    two = "rewards=[{name: digit_share}, {name: length, label: process, options: {limit: 4, buffer: 4}}]"
    schedule = "extensions=[{name: schedule, reward: process, start: 2.0, end: 0.0, over: 2}]"
    trainer = trainer_of(small_text, tmp_path / "run", two, schedule, "advantage={name: group, scale: none}")
    records = [trainer.iterate(iteration) for iteration in range(3)]
    for record, weight in zip(records, (2.0, 1.0, 0.0)):
        assert record["weight/process"] == weight
        total = record["reward/digit_share"] + weight * record["reward/process"]
        assert record["reward/total"] == pytest.approx(total, abs=1e-6)
    assert records[0]["ratio/first_error"] == 0.0
    rows, experience = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, experience)
    raw = scores.values[:, 0] + 2.0 * scores.values[:, 1]
    groups = [raw[experience.groups == g] for g in range(3)]
    by_hand = [float(value - group.mean()) for group in groups for value in group]
    assert trainer.advantages(scores, experience, rows).tolist() == pytest.approx(by_hand, abs=1e-5)


@pytest.mark.parametrize("name", ["schedule, reward: answer, start: 1, end: 2", "tightening"])
def test_an_extension_that_only_counts_iterations_may_follow_one_that_fills_prompts_in(name: str) -> None:
    recipe = load_recipe("text", ["rewards=[{name: answer}]", f"extensions=[variants, {{name: {name}}}]"])
    assert len(recipe.extensions) == 2


@pytest.mark.parametrize(
    ("rewards", "extensions", "said"),
    [
        ("[{name: answer}]", "{reward: other, start: 1, end: 2}", "asks reward 'other'; the rewards are answer"),
        ("[{name: answer}]", "{reward: answer, start: 1, end: 0}", "no reward without a schedule counts"),
        (
            "[{name: answer}, {name: digit_share, weight: 0}]", "{reward: digit_share, start: 1, end: 2}",
            "write another weight, which the schedule replaces",
        ),
        (
            "[{name: answer}, {name: digit_share}]",
            "{reward: answer, start: 1, end: 2}, {name: schedule, reward: answer, start: 1, end: 3}",
            "has schedule 2 times for reward answer",
        ),
        (BOUNDED, "{reward: answer, start: 1, end: 0}, multipliers", "reach 0"),
        (
            BOUNDED, "{reward: digit_share, start: 1, end: 2}, multipliers",
            "leave one of them out",
        ),
        ("[{name: answer}]", "{reward: answer, start: 1, end: 2, levels: 3}", "levels is 3"),
    ],
)  # fmt: skip
def test_faults_are_named(rewards: str, extensions: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_recipe("text", [f"rewards={rewards}", f"extensions=[{{name: schedule, {extensions[1:]}]"])
