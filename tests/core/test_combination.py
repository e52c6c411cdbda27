"""Gates, weights and ensembles of rewards, by hand."""

import io

import pytest
import torch

from flowgrpo.core.combination import (
    Multipliers,
    constrained_advantages,
    gated_rewards,
    group_gated_rewards,
    uncertainty_weighted_rewards,
    worst_case_rewards,
)

NAN = float("nan")


def close(got, want, tol=1e-6):
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want, atol=tol, rtol=tol, equal_nan=True)


def test_a_gate_opens_at_its_threshold():
    rewards, main = torch.tensor([5.0, 6, 7, NAN, 8]), torch.tensor([0.6, 0.7, 0.8, 0.1, NAN])
    close(gated_rewards(rewards, main, threshold=0.7), [0, 6, 7, NAN, NAN])
    close(gated_rewards(rewards, main, threshold=0.7, closed=NAN), [NAN, 6, 7, NAN, NAN])
    close(gated_rewards(rewards, main, threshold=0.7, closed=-1.0), [-1, 6, 7, NAN, NAN])
    both = torch.stack([rewards, 2 * rewards], 1)
    close(gated_rewards(both, main, threshold=0.7), [[0, 0], [6, 12], [7, 14], [NAN, NAN], [NAN, NAN]])


SUCCESS = torch.tensor([1.0, 1, 1, 0, 0, NAN, 1, NAN])  # shares 1 and 1/3 of those known, and none known
GROUPS = torch.tensor([4, 4, 2, 2, 2, 2, 4, 9])
LENGTH = torch.arange(1.0, 9.0)


def test_a_group_gate_opens_by_the_share_of_successes():
    close(group_gated_rewards(LENGTH, SUCCESS, GROUPS, at_least=1.0), [1, 2, 0, 0, 0, 0, 7, 0])
    close(group_gated_rewards(LENGTH, SUCCESS, GROUPS, at_least=1 / 3), [1, 2, 3, 4, 5, 6, 7, 0])
    close(group_gated_rewards(LENGTH, SUCCESS, GROUPS, at_most=0.5), [0, 0, 3, 4, 5, 6, 0, 0])
    close(group_gated_rewards(LENGTH, SUCCESS, GROUPS, at_least=0.1, at_most=0.9), [0, 0, 3, 4, 5, 6, 0, 0])
    close(group_gated_rewards(LENGTH, SUCCESS, GROUPS, at_most=1.0, closed=NAN), [1, 2, 3, 4, 5, 6, 7, NAN])


def test_a_group_gate_keeps_nan_and_shapes():
    rewards = torch.stack([LENGTH, LENGTH.masked_fill(LENGTH == 4, NAN)], 1)
    found = group_gated_rewards(rewards, SUCCESS, GROUPS, at_least=1.0)
    close(found[:, 0], group_gated_rewards(LENGTH, SUCCESS, GROUPS, at_least=1.0))
    close(found[:, 1], [1, 2, 0, NAN, 0, 0, 7, 0])
    right = torch.tensor([True, False])
    close(group_gated_rewards(torch.ones(2), right, [0, 0], at_least=0.5), [1, 1])


@pytest.mark.parametrize("wins", range(1, 11))
def test_a_share_written_as_a_decimal_reaches_itself(wins):
    success = (torch.arange(10) < wins).float()
    assert (group_gated_rewards(torch.ones(10), success, [0] * 10, at_least=wins / 10) == 1).all()


def test_group_gates_follow_a_permutation():
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    found = group_gated_rewards(LENGTH, SUCCESS, GROUPS, at_least=0.5)
    close(group_gated_rewards(LENGTH[order], SUCCESS[order], -GROUPS[order], at_least=0.5), found[order])


def test_ensembles_by_hand():
    rewards = torch.tensor([[1.0, 3, 5], [2, 2, 2], [NAN, 4, 8], [NAN, NAN, NAN], [NAN, 6, NAN]])
    close(worst_case_rewards(rewards), [1, 2, 4, NAN, 6])
    close(uncertainty_weighted_rewards(rewards, weight=0.75), [3 - 0.75 * 8 / 3, 2, 6 - 0.75 * 4, NAN, 6])
    close(uncertainty_weighted_rewards(rewards, weight=0.0), [3, 2, 6, NAN, 6])
    close(uncertainty_weighted_rewards(rewards)[0], 3 - 0.5 * 8 / 3)
    order = torch.tensor([2, 0, 1])
    close(uncertainty_weighted_rewards(rewards[:, order]), uncertainty_weighted_rewards(rewards))
    large = torch.tensor([[1e6, 1e6 + 1, 1e6 + 2]], dtype=torch.float64)  # one-pass variance has no digits here
    close(uncertainty_weighted_rewards(large, weight=3.0), [1e6 + 1 - 2], 1e-12)


@pytest.mark.parametrize(
    "function",
    [
        worst_case_rewards,
        uncertainty_weighted_rewards,
        lambda r: gated_rewards(r[:, 0], r[:, 1], threshold=0.0),
        lambda r: group_gated_rewards(r[:, 0], torch.ones(2), [0, 0], at_least=0.0),
        lambda r: constrained_advantages(r[:, 0], r, torch.zeros(2)),
    ],
)
def test_rewards_carry_no_gradient_and_are_float32_at_least(function):
    assert not function(torch.ones(2, 2, requires_grad=True)).requires_grad
    assert function(torch.ones(2, 2, dtype=torch.bfloat16)).dtype == torch.float32
    assert function(torch.ones(2, 2, dtype=torch.float64)).dtype == torch.float64


def test_constraints_share_the_weight_with_the_reward():
    main, constraints = torch.tensor([1.0, -1]), torch.tensor([[2.0, 0], [0, 4]])
    close(constrained_advantages(main, constraints, torch.tensor([1.0, 0.5])), [1.2, 0.4])
    close(constrained_advantages(main, constraints, torch.zeros(2)), main)
    huge = constrained_advantages(main, constraints, torch.tensor([1e9, 0.0]))
    close(huge, [2, 0], 1e-5)  # the weights add up to 1


def test_multipliers_ascend_where_a_constraint_is_missed():
    multipliers = Multipliers([0.9, 0.5], rate=0.5, maximum=0.5)
    close(multipliers.values, [0, 0])
    batch = torch.tensor([[0.4, 1.0], [0.6, 1.0], [NAN, 1.0]])
    close(multipliers.step(batch), [0.2, 0])  # 0.5 * (0.9 - 0.5), and never below 0
    close(multipliers.step(batch), [0.4, 0])
    close(multipliers.step(batch), [0.5, 0])  # never above the maximum
    close(multipliers.step(torch.tensor([[1.0, 0.1]])), [0.45, 0.2])
    close(multipliers.step(torch.tensor([[NAN, 0.5]])), [0.45, 0.2])
    close(multipliers.values, [0.45, 0.2])
    # By default by a twentieth of what is missing, up to 10.
    close(Multipliers([1.0]).step(torch.tensor([[0.0]])), [0.05])
    close(Multipliers([1.0], initial=10.0).step(torch.tensor([[0.0]])), [10.0])


def test_multipliers_are_saved_and_resume():
    multipliers = Multipliers([0.9, 0.5], initial=0.3)
    multipliers.step(torch.tensor([[0.1, 0.2]]))
    file = io.BytesIO()
    torch.save(multipliers.state_dict(), file)
    file.seek(0)
    other = Multipliers([0.9, 0.5])
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.values, multipliers.values)
    kept = multipliers.state_dict()
    multipliers.step(torch.tensor([[0.0, 0.0]]))
    assert torch.equal(kept["values"], other.values)
    with pytest.raises(ValueError, match="holds 2 multipliers but there are 1 thresholds"):
        Multipliers([0.5]).load_state_dict(other.state_dict())


def test_multipliers_bound_how_far_a_constraint_is_missed_on_average():
    """Dual ascent's guarantee: rate * (sum of what was missing) is at most the growth of the multiplier."""
    g = torch.Generator().manual_seed(0)
    multipliers, missing = Multipliers([0.55, 0.3], rate=0.1, maximum=1e6), torch.zeros(2)
    for _ in range(50):
        batch = torch.rand(4, 2, generator=g)
        missing += torch.tensor([0.55, 0.3]) - batch.mean(0)
        multipliers.step(batch)
    assert (0.1 * missing <= multipliers.values + 1e-5).all()
    assert multipliers.values[0] > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gated_rewards(torch.zeros(2), torch.zeros(1), threshold=0.5), "`main` has shape"),
        (lambda: group_gated_rewards(torch.zeros(2), torch.zeros(2), [0, 0]), "Neither `at_least` nor `at_most`"),
        (
            lambda: group_gated_rewards(torch.zeros(1), torch.zeros(1), [0], at_least=1.5),
            "`at_least` is 1.5; use a share",
        ),
        (lambda: group_gated_rewards(torch.zeros(1), torch.zeros(1), [0], at_most=-0.5), "`at_most` is -0.5"),
        (lambda: group_gated_rewards(torch.zeros(1), torch.ones(1) / 2, [0], at_most=0.5), "neither 0 nor 1"),
        (lambda: group_gated_rewards(torch.zeros(2), torch.zeros(1), [0, 0], at_most=0.5), "`success` has shape"),
        (lambda: worst_case_rewards(torch.zeros(2)), r"has shape \(2,\); give one column per model"),
        (lambda: uncertainty_weighted_rewards(torch.zeros(2, 0)), r"has shape \(2, 0\)"),
        (lambda: uncertainty_weighted_rewards(torch.zeros(2, 2), weight=-1.0), "`weight` is -1.0; use 0 or more"),
        (lambda: constrained_advantages(torch.zeros(2), torch.zeros(2, 1), torch.zeros(2)), r"give \(B,\), \(B, K\)"),
        (lambda: constrained_advantages(torch.zeros(3), torch.zeros(2, 1), torch.zeros(1)), r"give \(B,\), \(B, K\)"),
        (lambda: constrained_advantages(torch.zeros(2), torch.zeros(2, 1), -torch.ones(1)), "a negative value"),
        (lambda: Multipliers([]), "`thresholds` is empty"),
        (lambda: Multipliers([0.5], rate=0.0), "`rate` is 0.0; use a number above 0"),
        (lambda: Multipliers([0.5], initial=2.0, maximum=1.0), "`initial` is 2.0 and `maximum` 1.0"),
        (lambda: Multipliers([0.5]).step(torch.zeros(3, 2)), r"give one column per threshold, \(B, 1\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
