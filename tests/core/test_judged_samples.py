"""Samples that must satisfy several judges, by hand."""

import math

import pytest
import torch

from flowgrpo.core.judged_samples import calibrated_advantages, satisfied_judges

NAN = math.nan


def test_one_violation_is_enough_and_a_judge_that_does_not_apply_has_no_say():
    scores = torch.tensor([[0.5, 1.0], [0.4, 1.0], [0.5, 0.0], [NAN, 1.0], [NAN, 0.0], [NAN, NAN]])
    assert satisfied_judges(scores, [0.5, 1.0]).tolist() == [True, False, False, True, False, True]
    assert satisfied_judges(torch.tensor([[0.1]]), [0.1]).tolist() == [True]
    with pytest.raises(ValueError, match=r"give one column per threshold, \(B, 1\)"):
        satisfied_judges(scores, [0.5])


def test_violations_get_nothing_and_the_others_their_calibrated_reward():
    """The mean of the first group is 1: sigmoid(0), sigmoid(-1) and nothing for the 2. In group 1 nobody satisfies."""
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0, 7.0])
    satisfied = torch.tensor([True, True, False, False, False])
    found = calibrated_advantages(rewards, satisfied, [0, 0, 0, 1, 1])
    assert found.tolist() == pytest.approx([0.5, 1 / (1 + math.e), 0.0, 0.0, 0.0])
    half = calibrated_advantages(rewards, satisfied, [0, 0, 0, 1, 1], scale=2.0)
    assert half[1] == pytest.approx(1 / (1 + math.exp(0.5)))


def test_only_the_best_of_those_that_satisfy():
    """The mean is 2. The 4 violates; of the others the two 2 are equal."""
    rewards = torch.tensor([2.0, 0.0, 4.0, 2.0])
    found = calibrated_advantages(rewards, torch.tensor([True, True, False, True]), [0] * 4, best=True)
    assert found.tolist() == [0.5, 0.0, 0.0, 0.5]


def test_an_unknown_reward_enters_nothing():
    """Without the NaN the mean is 2, and the best is 3."""
    rewards, all_of_them = torch.tensor([1.0, NAN, 3.0]), torch.ones(3, dtype=torch.bool)
    found = calibrated_advantages(rewards, all_of_them, [0] * 3)
    assert found.tolist() == pytest.approx([1 / (1 + math.e), 0.0, math.e / (1 + math.e)])
    assert calibrated_advantages(torch.tensor([NAN]), all_of_them[:1], [0], best=True).tolist() == [0.0]
    with pytest.raises(ValueError, match="`scale` is 0"):
        calibrated_advantages(rewards, all_of_them, [0] * 3, scale=0)
