"""The ranks and scores that the data give to samples."""

import pytest

from flowgrpo.rewards.base import Reward, RewardSpec
from flowgrpo.rewards.given import Given
from flowgrpo.rewards.runner import RewardSet

PROMPTS = ["a", "a", "a"]
PLACES = {"given_place": [0, 1, 2], "given_places": [3, 3, 3]}


def test_the_order_of_the_columns_is_the_rank() -> None:
    assert Given()(PROMPTS, **PLACES) == [1.0, 0.5, 0.0]
    assert Given()(PROMPTS[:1], given_place=[0], given_places=[1]) == [1.0]


def test_scores_of_the_data_come_from_their_columns() -> None:
    reward = Given(["x", "y", "z"])
    columns = {"x": [0.1] * 3, "y": [None] * 3, "z": [7] * 3}
    assert reward(PROMPTS, **PLACES, **columns) == [0.1, None, 7.0]


def test_a_label_of_a_single_sample_may_be_true_or_false() -> None:
    assert Given(["label"])(PROMPTS[:2], given_place=[0, 0], given_places=[1, 1], label=[True, False]) == [1.0, 0.0]


@pytest.mark.parametrize("value", ["good", float("nan"), [1.0]])
def test_a_score_is_a_number(value: object) -> None:
    with pytest.raises(ValueError, match=r"column `x` has .* write a number for each sample, or null"):
        Given(["x"])(PROMPTS[:1], given_place=[0], given_places=[1], x=[value])


def test_there_is_a_column_of_scores_for_each_image() -> None:
    with pytest.raises(ValueError, match="scores names 2 columns, and a prompt has 3 samples"):
        Given(["x", "y"])(PROMPTS, **PLACES, x=[0] * 3, y=[0] * 3)
    for wrong in ("label", ["x", "x"]):
        with pytest.raises(ValueError, match="give a list of columns, one for each sample"):
            Given(wrong)


def test_missing_columns_are_told_before_anything_is_scored() -> None:
    (reward,) = RewardSet([RewardSpec("given", options={"scores": ["x", "y"]})]).rewards
    reward.check("images", ["x", "y", "given_place", "given_places"], grouped=True)
    with pytest.raises(ValueError, match="takes `y`, which the prompts do not have"):
        reward.check("images", ["x", "given_place", "given_places"], grouped=True)
    with pytest.raises(ValueError, match=r"these samples are not given; use sampler\.plan given"):
        Reward.check(reward, "images", ["x", "y"], grouped=True)
