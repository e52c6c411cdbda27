"""Factors from the outcomes of a group: entropies, by hand and under permutations."""

import math

import pytest
import torch

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.outcomes import (
    consistency_advantages,
    outcome_entropy,
    quantile_advantages,
    semantic_entropy_weights,
)

NAN = float("nan")


def close(got, want, tol=1e-6):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), atol=tol, rtol=tol)


def test_entropy_by_hand():
    # Shares 1/2, 1/4, 1/4; then one outcome, whose id occurs in the other group too.
    found = outcome_entropy([0, 0, 1, 2, 2, 2], [7, 7, 7, 7, 3, 3])
    close(found, [1.5 * math.log(2)] * 4 + [0, 0])
    assert (found[4:] == 0).all()
    valid = torch.tensor([True, False, True, False, False, False])
    close(outcome_entropy([0, 0, 1, 2, 2, 2], [7, 7, 7, 7, 3, 3], valid=valid), [math.log(2)] * 4 + [0, 0])


def test_entropy_follows_a_permutation_and_new_names():
    g = torch.Generator().manual_seed(0)
    outcomes, groups = torch.randint(0, 4, (20,), generator=g), torch.randint(0, 3, (20,), generator=g)
    order = torch.randperm(20, generator=g)
    names, labels = torch.tensor([9, -4, 100, 0]), torch.tensor([5, 50, -5])
    close(outcome_entropy(names[outcomes][order], labels[groups][order]), outcome_entropy(outcomes, groups)[order])


def test_semantic_entropy_holds_back_groups_that_disagree():
    clusters, groups = [0, 0, 1, 2, 4, 4, 1], [0, 0, 0, 0, 1, 1, 2]  # H / log 4 = 3/4 in group 0
    close(semantic_entropy_weights(clusters, groups, alpha=0.4), [0.7] * 4 + [1] * 3)
    found = semantic_entropy_weights(clusters, groups, alpha=0.4, form="exponential")
    close(found, [math.exp(-0.3)] * 4 + [1] * 3)
    # Without the fourth answer, shares 2/3 and 1/3 of 3.
    valid = torch.tensor([True, True, True, False, True, True, True])
    relative = (math.log(3) - 2 / 3 * math.log(2)) / math.log(3)
    close(semantic_entropy_weights(clusters, groups, valid=valid), [1 - relative] * 4 + [1] * 3)


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 10, 12, 100])
def test_a_factor_is_never_negative(size):
    found = semantic_entropy_weights(torch.arange(size), [0] * size, alpha=1.0)
    close(found, torch.zeros(size))
    assert (found >= 0).all()


def test_consistency_passes_from_the_group_to_the_batch_by_hand():
    rewards, groups = torch.tensor([0.0, 1, 1, 1, 0, 0]), torch.tensor([0, 0, 1, 1, 2, 2])
    mixed = 1 / (1 + math.exp(-3 * (math.log(2) - 0.2)))
    agreed = 1 / (1 + math.exp(3 * 0.2))
    own, level = 0.5**0.5, 1.0  # levels 1/2, 1, 0 over the three groups: sample deviation 1/2
    want = [-mixed * own, mixed * own, (1 - agreed) * level, (1 - agreed) * level, agreed - 1, agreed - 1]
    close(consistency_advantages(rewards, groups, sharpness=3.0, threshold=0.2, eps=0.0), want)
    want[2] = (1 - agreed) * 0.5 / 1.5
    close(consistency_advantages(rewards, groups, sharpness=3.0, threshold=0.2, eps=1.0)[2], want[2])
    # A group of one has a level too: 1 against 0, of a sample deviation of 0.5^0.5.
    found = consistency_advantages(torch.tensor([1.0, 0, 0]), [0, 1, 1], sharpness=3.0, threshold=0.2, eps=0.0)
    close(found, [(1 - agreed) * own, (agreed - 1) * own, (agreed - 1) * own])


def test_consistency_within_one_group_is_the_groups_advantage_times_its_weight():
    pair = torch.tensor([0.0, 1.0])
    weight, own = 1 / (1 + math.exp(-10 * (math.log(2) - 0.3))), 0.5 / (0.5**0.5 + 1e-4)
    close(consistency_advantages(pair, [0, 0]), [-weight * own, weight * own])
    close(consistency_advantages(pair, [0, 0], sharpness=0.0), [-own / 2, own / 2])


def test_consistency_takes_the_outcomes_it_is_given():
    # Two different wrong answers do not agree.
    rewards, groups, outcomes = torch.tensor([0.0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]), [3, 4, 5, 5]
    found = consistency_advantages(rewards, groups, sharpness=1.0, threshold=0.0, outcomes=outcomes, eps=0.0)
    level = 0.5**0.5
    differ = 1 / (1 + math.exp(-math.log(2)))
    close(found, [-(1 - differ) * level] * 2 + [0.5 * level] * 2)


def test_a_batch_of_one_group_has_no_level():
    rewards = torch.tensor([1.0, 1.0, 1.0])
    assert (consistency_advantages(rewards, [0, 0, 0]) == 0).all()


def test_quantiles_weigh_regions_by_hand():
    rewards, groups = torch.tensor([4.0, 1, 16, 2, 8]), [0] * 5  # quantiles at 0.4 and 0.8: 2 and 8
    found = quantile_advantages(rewards, groups, low=0.4, high=0.8, omega=1.0, scale="none")
    close(found, [2 - 2.4, -2 - 2.4, 6 - 2.4, 0 - 2.4, 6 - 2.4])
    found = quantile_advantages(rewards, groups, low=0.4, high=0.8, omega=3.0, scale="none")
    close(found, [2 - 2, -4 - 2, 6 - 2, 0 - 2, 6 - 2])
    found = quantile_advantages(rewards, groups, low=0.4, high=0.8, omega=3.0, ddof=0, eps=1.0)
    close(found, torch.tensor([0.0, -6, 4, -2, 4]) / (14.4**0.5 + 1))


def test_without_risk_aversion_it_is_the_groups_advantage():
    rewards, groups = torch.rand(11, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 5 + [1])
    found = quantile_advantages(rewards, groups, low=0.3, high=1.0, omega=0.0)
    close(found, group_advantages(rewards, groups), 1e-5)


def test_a_level_of_a_whole_number_of_samples_is_not_rounded_up():
    found = quantile_advantages(torch.arange(100.0), [0] * 100, low=0.07, high=1.0, omega=1.0, scale="none")
    close(found.diff(), [2.0] * 6 + [1.0] * 93, 1e-4)  # the quantile at 0.07 of 0..99 is 6


def test_the_lowest_level_is_the_minimum_in_every_group():
    rewards, groups = torch.tensor([4.0, 1, 16, 2, NAN, 8]), [1, 0, 1, 0, 2, 1]
    found = quantile_advantages(rewards, groups, low=0.0, high=0.5, omega=9.0, scale="none")
    close(found, [-8 / 3, 0, 4 / 3, 0, 0, 4 / 3])  # 4 8 16 up to 8, and 1 2 up to 1


def test_quantiles_are_those_of_each_group_and_column():
    g = torch.Generator().manual_seed(1)
    rewards, groups = torch.rand(30, 3, generator=g), torch.randint(0, 3, (30,), generator=g)
    rewards[::7, 1] = NAN
    found = quantile_advantages(rewards, groups, low=0.3, high=0.7)
    for k in range(3):
        for i in range(3):
            rows = (groups == i) & ~rewards[:, k].isnan()
            values = rewards[rows, k].double()
            low, high = (values.sort().values[math.ceil(u * len(values) - 1e-9) - 1] for u in (0.3, 0.7))
            utility = 2 * (values - low).clamp(max=0) + values.clamp(low, high)
            close(found[rows, k], group_advantages(utility, [0] * len(values)).float(), 1e-5)


def test_the_weights_are_the_policy_gradient_of_the_mixed_value_at_risk():
    """Rewards with probabilities 0.2, 0.3, 0.3, 0.2, in a group that has them in these shares."""
    values, low, high, omega = torch.tensor([1.0, 2, 5, 9], dtype=torch.float64), 0.35, 0.65, 1.5
    logits = torch.tensor([0.2, 0.3, 0.3, 0.2], dtype=torch.float64).log()

    def risk(logits):
        edges = torch.cat([torch.zeros(1, dtype=torch.float64), logits.softmax(0).cumsum(0)])

        def integral(a, b):
            return (values * (edges[1:].clamp(a, b) - edges[:-1].clamp(a, b))).sum()

        return (1 + omega) * integral(0.0, low) + integral(low, high)

    wanted = torch.autograd.functional.jacobian(risk, logits)
    rewards = values.repeat_interleave(torch.tensor([2, 3, 3, 2]))
    found = quantile_advantages(rewards, [0] * 10, low=low, high=high, omega=omega, scale="none")
    weight = found[torch.tensor([0, 2, 5, 8])]
    probability = logits.softmax(0)
    # The score of outcome i is e_i - p.
    gradient = probability * weight - probability * (probability * weight).sum()
    close(gradient, wanted, 1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: outcome_entropy([0, 1], [0]), "`groups` has shape"),
        (lambda: outcome_entropy([0, 1], [0, 0], valid=torch.ones(1)), "`valid` has shape"),
        (lambda: semantic_entropy_weights([0], [0], form="focal"), "`form` is 'focal'; use one of linear, exponential"),
        (lambda: semantic_entropy_weights([0], [0], alpha=1.5), "`alpha` is 1.5; use 0 or more, and 1 at most"),
        (lambda: semantic_entropy_weights([0], [0], alpha=-1.0, form="exponential"), "`alpha` is -1.0"),
        (lambda: semantic_entropy_weights([0], [0], valid=torch.ones(2)), "`valid` has shape"),
        (lambda: consistency_advantages(torch.zeros(1), [0], sharpness=-1.0), "`sharpness` is -1.0; use 0 or more"),
        (lambda: consistency_advantages(torch.zeros(1, 2), [0]), r"`rewards` has shape \(1, 2\)"),
        (lambda: consistency_advantages(torch.zeros(2), [0, 0], outcomes=[1]), "`outcomes` has shape"),
        (lambda: quantile_advantages(torch.zeros(1), [0], low=0.8, high=0.8), "use 0 <= low < high <= 1"),
        (lambda: quantile_advantages(torch.zeros(1), [0], low=-0.1), "`low` is -0.1 and `high` is 0.8"),
        (lambda: quantile_advantages(torch.zeros(1), [0], high=1.1), "`high` is 1.1"),
        (lambda: quantile_advantages(torch.zeros(1), [0], omega=-1.0), "`omega` is -1.0; use 0 or more"),
        (lambda: quantile_advantages(torch.zeros(1), [0], scale="std"), "`scale` is 'std'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_large_alpha_is_for_the_exponential_form():
    close(semantic_entropy_weights([0, 1], [0, 0], alpha=3.0, form="exponential"), [math.exp(-3.0)] * 2)
