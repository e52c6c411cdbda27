"""Rewards and advantages under budgets of tokens, worked out by hand."""

import math

import pytest
import torch

from flowgrpo.core.token_budgets import (
    budget_at,
    budget_relative_advantages,
    budgeted_rewards,
    decayed_rewards,
    nested_advantages,
    triangular,
)


def test_each_correct_exit_gets_half_of_the_one_before() -> None:
    """The wrong exit at 4 gets nothing and halves nothing; the second path begins anew."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, torch.nan, 1.0])
    found = decayed_rewards(rewards, [0, 0, 0, 0, 0, 1], [9, 2, 4, 6, 1, 7])
    assert found[:4].tolist() == [0.25, 1.0, 0.0, 0.5]
    assert math.isnan(found[4])
    assert found[5] == 1.0
    assert decayed_rewards(torch.tensor([0.9, 0.9]), [0, 0], [1, 2], decay=0.0).tolist() == [1.0, 0.0]


def test_thoughts_are_compared_with_their_own_past_and_with_the_group() -> None:
    """Returns are (1/2, 1/2) and (1, 1/2). V1 of the second stretch is 0 and 1/2, V2 is 3/4 and then 1/2."""
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    found = budget_relative_advantages(rewards, [0, 0], torch.ones(2))
    assert found.tolist() == [[-0.25, 0.25], [0.25, 0.0]]


def test_later_budgets_of_the_past_count_twice() -> None:
    """Last stretch of (1, 0, 0): V1 = (1 + 2 x 0) / 3 / 3, V2 = 0, so A = 0 - 2/3 x 1/9."""
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = budget_relative_advantages(rewards, [0, 0], torch.ones(3))
    assert float(found[0, 2]) == pytest.approx(-2 / 27)
    assert float(found[0, 0]) == pytest.approx(1 / 6)


def test_the_prior_weights_the_budgets_and_its_size_does_not_matter() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    found = budget_relative_advantages(rewards, [0, 0], torch.tensor([1.0, 3.0]))
    assert found[:, 0].tolist() == pytest.approx([0.125, -0.125])
    assert torch.equal(found, budget_relative_advantages(rewards, [0, 0], torch.tensor([2.0, 6.0])))


def test_a_prior_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give \(N, J\) and \(J,\)"):
        budget_relative_advantages(torch.zeros(2, 3), [0, 0], torch.ones(2))
    with pytest.raises(ValueError, match="at least one above 0"):
        budget_relative_advantages(torch.zeros(2, 2), [0, 0], torch.zeros(2))


def test_shorter_than_the_budget_gains_nothing() -> None:
    """L = 4, budget 2: at most cos(pi/4); at 4 tokens cos(pi/2) - 2/4 of the price; a wrong answer has nothing."""
    lengths, budgets = torch.tensor([1, 2, 4, 1]), torch.tensor([2, 2, 2, 2])
    found = budgeted_rewards(torch.tensor([1.0, 1.0, 1.0, 0.0]), lengths, budgets, 4)
    assert found.tolist() == pytest.approx([math.sqrt(0.5), math.sqrt(0.5), -0.125, 0.0], abs=1e-6)
    long = budgeted_rewards(torch.tensor([1.0]), torch.tensor([1]), torch.tensor([0]), 4)
    assert float(long) == pytest.approx(math.cos(math.pi / 8) - 0.0625)
    with pytest.raises(ValueError, match="a budget is 5 tokens, and the longest length is 4"):
        budgeted_rewards(torch.tensor([1.0]), torch.tensor([1]), torch.tensor([5]), 4)


def test_within_and_between_subgroups() -> None:
    """Means 1/2 and 1 in a group of mean 3/4; the second group has the same ids of subgroups, and equal rewards."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 5.0, 5.0])
    groups, subgroups = [0, 0, 0, 0, 1, 1], [7, 7, 9, 9, 7, 9]
    found = nested_advantages(rewards, groups, subgroups, between=2.0, scale="none")
    assert found.tolist() == pytest.approx([0.0, -1.0, 0.5, 0.5, 0.0, 0.0])
    scaled = nested_advantages(rewards, groups, subgroups, eps=0.0, ddof=0)
    third = 1 / math.sqrt(3)
    assert scaled.tolist() == pytest.approx([1 - third, -1 - third, third, third, 0.0, 0.0])


def test_a_missing_reward_changes_no_subgroup() -> None:
    rewards = torch.tensor([1.0, 0.0, torch.nan, 1.0])
    found = nested_advantages(rewards, [0] * 4, [0, 0, 0, 1], scale="none")
    assert found.tolist() == pytest.approx([1 / 3, -2 / 3, 0.0, 1 / 3])


def test_the_budget_falls_in_steps() -> None:
    found = [budget_at(k, start=256, factor=0.8, every=20) for k in (0, 19, 20, 40)]
    assert found == pytest.approx([256, 256, 204.8, 163.84])
    assert budget_at(10_000, start=256, factor=0.8, every=20, least=16) == 16


def test_a_length_near_the_budget_is_worth_most() -> None:
    found = triangular(torch.tensor([0, 4, 8, 12, 16, 20]), 8.0)
    assert found.tolist() == [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]


def test_an_unknown_reward_leaves_its_weight_to_the_other_budgets() -> None:
    """Thoughts (1, ?, 0): R_0 = (1 + 0) / 2 of all the weight, R_1 = 0. V1 of the last stretch is of the 1 alone."""
    rewards = torch.tensor([[1.0, torch.nan, 0.0], [0.0, 0.0, 0.0]])
    found = budget_relative_advantages(rewards, [0, 0], torch.ones(3))
    assert found[0].tolist() == pytest.approx([0.5 - 0.25, -(1 / 3) * (2 / 3), -(2 / 3) * (1 / 3)])
    assert found.isfinite().all()
    last = budget_relative_advantages(torch.tensor([[1.0, torch.nan], [0.0, 1.0]]), [0, 0], torch.ones(2))
    assert last.isnan().tolist() == [[False, True], [False, False]]
