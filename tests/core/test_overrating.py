"""How far a trained reward overrates images: ranks, their differences and the suspects, worked out by hand."""

import math

import pytest
import torch

from flowgrpo.core.overrating import overrating, rank_shares, suspects

NAN = math.nan


def test_places_are_shares_and_equal_values_share_theirs() -> None:
    assert rank_shares(torch.tensor([3.0, 1.0, 2.0, 7.0])).tolist() == [0.75, 0.25, 0.5, 1.0]
    # The two zeros share the places 1 and 2, and the three ones the places 3 to 5.
    assert rank_shares(torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])).tolist() == pytest.approx([0.8, 0.3, 0.8, 0.3, 0.8])


def test_a_missing_value_has_no_place_and_takes_none() -> None:
    found = rank_shares(torch.tensor([NAN, 5.0, NAN, 4.0]))
    assert found[[1, 3]].tolist() == [1.0, 0.5]
    assert found[[0, 2]].isnan().all()
    assert rank_shares(torch.tensor([NAN, NAN])).isnan().all()


def test_an_image_that_the_trained_reward_alone_likes_is_overrated() -> None:
    trained = torch.tensor([4.0, 3.0, 2.0, 1.0])
    light = torch.tensor([[1.0, 10.0], [2.0, 40.0], [3.0, 30.0], [4.0, 20.0]])
    # The light rewards rank the first image lowest, with 1/4 and 1/4; the trained one ranks it highest.
    assert overrating(trained, light).tolist() == pytest.approx([0.75, 0.0, -0.25, -0.5])


def test_only_the_order_of_a_reward_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    trained, light = torch.randn(9, generator=generator), torch.randn(9, 2, generator=generator)
    torch.testing.assert_close(overrating(trained, light), overrating(trained.exp() * 7 - 3, light * 100))


def test_light_rewards_that_do_not_apply_are_left_out() -> None:
    trained, light = torch.tensor([1.0, 2.0]), torch.tensor([[2.0, NAN], [1.0, NAN]])
    assert overrating(trained, light).tolist() == [-0.5, 0.5]
    assert overrating(trained, torch.full((2, 2), NAN)).isnan().all()


def test_suspects_are_the_share_above_the_quantile_of_what_is_not_underrated() -> None:
    overrated = torch.tensor([-0.9, -0.5, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, NAN], dtype=torch.float64)
    # Ten are not underrated: the quantile of 0.8 lies between 0.7 and 0.8, at 0.72.
    assert suspects(overrated, 0.2).nonzero()[:, 0].tolist() == [10, 11]
    assert suspects(overrated, 0.1).nonzero()[:, 0].tolist() == [11]
    assert int(suspects(overrated, 1.0).sum()) == 9  # the least of them is at the quantile itself


def test_without_a_most_overrated_image_none_is_suspect() -> None:
    assert not suspects(torch.zeros(4, dtype=torch.float64), 0.1).any()
    assert not suspects(torch.tensor([-1.0, NAN], dtype=torch.float64), 0.1).any()
