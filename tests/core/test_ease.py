"""The ease of a prompt, and the factors of DARS and of a linear weight by difficulty."""

import math

import pytest
import torch

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.ease import difficulty_weights, group_ease

NAN = math.nan


def test_the_ease_is_the_mean_reward_within_0_and_1():
    rewards = torch.tensor([1.0, 0.0, 0.0, NAN, 5.0, -2.0, NAN])
    found = group_ease(rewards, [3, 3, 3, 3, 1, 0, 8])
    torch.testing.assert_close(found[:4], torch.full((4,), 1 / 3, dtype=found.dtype))
    assert found[4:6].tolist() == [1.0, 0.0]
    assert math.isnan(found[6])


def test_linear_by_hand():
    ease = torch.tensor([0.0, 0.25, 0.5, 1.0, NAN])
    assert difficulty_weights(ease).tolist() == [2.0, 1.5, 1.0, 0.0, 1.0]
    assert difficulty_weights(ease, strength=0.5).tolist() == [1.5, 1.25, 1.0, 0.5, 1.0]


@pytest.mark.parametrize("solved", [1, 2, 3, 4, 5, 7])
def test_even_lets_hard_prompts_add_up_to_as_much_as_medium_ones(solved):
    """Of 8 samples: the sizes of the advantages add up to 8 at 4 successes, and to less elsewhere."""
    rewards = torch.tensor([1.0] * solved + [0.0] * (8 - solved), dtype=torch.float64)
    advantages = group_advantages(rewards, [0] * 8, eps=0.0, ddof=0)
    ease = group_ease(rewards, [0] * 8)
    even = (advantages * difficulty_weights(ease, form="even")).abs().sum()
    hard = (advantages * difficulty_weights(ease, form="hard")).abs().sum()
    if solved <= 4:
        assert float(even) == pytest.approx(8.0)
        assert float(hard) == pytest.approx(16.0 * (1 - solved / 8))
    else:
        assert float(even) == float(hard) == float(advantages.abs().sum())


def test_a_factor_has_a_largest_value():
    assert difficulty_weights(torch.tensor([0.0, 1e-9]), form="even", most=3.0).tolist() == [3.0, 3.0]
    assert difficulty_weights(torch.tensor([0.0]), form="linear", most=1.5).tolist() == [1.5]


@pytest.mark.parametrize("options", [{"form": "odd"}, {"strength": 1.5}, {"most": 0.5}])
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match="use"):
        difficulty_weights(torch.zeros(1), **options)
