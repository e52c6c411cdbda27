"""wd1's weights, exponential in the reward, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from flowgrpo.core.outcomes import exponential_advantages


def test_two_samples_by_hand() -> None:
    """Rewards 1 and 0 are ±1/2 around their mean: w+ of the better is e^s/2 / (e^s/2 + e^-s/2)."""
    for sharpness in (0.5, 1.0, 3.0):
        share = 1 / (1 + math.exp(-sharpness))
        found = exponential_advantages(torch.tensor([1.0, 0.0]), torch.tensor([4, 4]), sharpness=sharpness)
        assert found.tolist() == pytest.approx([2 * (share - (1 - share)), 2 * ((1 - share) - share)])


def test_groups_sum_to_zero_and_do_not_see_each_other() -> None:
    rewards = torch.tensor([0.1, 5.0, 0.7, -2.0, 0.3, 0.3])
    groups = torch.tensor([0, 1, 0, 1, 2, 2])
    found = exponential_advantages(rewards, groups)
    for group in range(3):
        assert float(found[groups == group].sum()) == pytest.approx(0.0, abs=1e-6)
    assert found[4:].tolist() == [0.0, 0.0]
    moved = exponential_advantages(rewards + 100.0 * (groups == 1), groups)
    assert torch.allclose(moved, found, atol=1e-5)


def test_a_missing_reward_leaves_the_others_as_they_are() -> None:
    whole = exponential_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    found = exponential_advantages(torch.tensor([1.0, torch.nan, 0.0]), torch.tensor([0, 0, 0]))
    assert found[[0, 2]].tolist() == pytest.approx(whole.tolist())
    assert float(found.nan_to_num()[1]) == 0.0


def test_a_sharpness_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        exponential_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), sharpness=0.0)
