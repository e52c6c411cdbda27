"""Returns by the least reward of a chain, by hand and between their bounds."""

import math

import pytest
import torch

from flowgrpo.core.worst_step import minimum_returns, minimum_weighted_rewards

NAN = float("nan")


def close(got, want, tol=1e-6):
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want, atol=tol, rtol=tol, equal_nan=True)


def test_the_least_reward_from_a_step_on():
    rewards = torch.tensor([[3.0, 1, 2, 5], [-1, 4, 3, 2]])
    close(minimum_returns(rewards), [[1, 1, 2, 5], [-1, 2, 2, 2]])
    close(minimum_returns(2 * rewards + 7), 2 * minimum_returns(rewards) + 7)


def test_steps_without_a_reward_are_left_out():
    rewards = torch.tensor([[NAN, 2.0, NAN, 5, NAN], [NAN] * 5])
    close(minimum_returns(rewards), [[2, 2, 5, 5, NAN], [NAN] * 5])
    close(minimum_weighted_rewards(rewards, temperature=1e4), [[0, 1, 0, 2.5, 0], [0] * 5], 1e-3)


def test_weighted_rewards_by_hand():
    # exp(-r / T) is 1/2 and 1/4: weights 2/3 and 1/3.
    t = 0.5
    rewards = torch.tensor([[t * math.log(2), t * math.log(4)]])
    close(minimum_weighted_rewards(rewards, temperature=t), [[2 / 3 * t * math.log(2), 1 / 3 * t * math.log(4)]])
    close(minimum_weighted_rewards(rewards / 5), [[2 / 15 * t * math.log(2), 1 / 15 * t * math.log(4)]])


def test_their_sum_is_between_the_minimum_and_the_mean():
    rewards = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    close(minimum_weighted_rewards(rewards, temperature=1e-4).sum(1), rewards.amin(1), 1e-4)
    close(minimum_weighted_rewards(rewards, temperature=1e5).sum(1), rewards.mean(1), 1e-4)
    default = minimum_weighted_rewards(rewards).sum(1)
    assert ((default > rewards.amin(1)) & (default < rewards.mean(1))).all()


@pytest.mark.parametrize("function", [minimum_returns, minimum_weighted_rewards])
def test_types_and_empty_rows(function):
    assert function(torch.zeros(2, 3, dtype=torch.float16)).dtype == torch.float32
    assert function(torch.zeros(2, 3, dtype=torch.float64)).dtype == torch.float64
    assert not function(torch.zeros(2, 3, requires_grad=True)).requires_grad
    assert function(torch.zeros(0, 3)).shape == (0, 3)
    assert function(torch.zeros(2, 0)).shape == (2, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: minimum_returns(torch.zeros(3)), r"has shape \(3,\); give one reward per step, \(B, T\)"),
        (lambda: minimum_returns(torch.tensor([[math.inf]])), "`step_rewards` holds an infinite value"),
        (
            lambda: minimum_weighted_rewards(torch.zeros(1, 2), temperature=0.0),
            "`temperature` is 0.0; use a number above",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
