"""Baselines beyond a group's mean, by hand."""

import math

import pytest
import torch

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.baselines import (
    anchor_state_advantages,
    beta_advantages,
    stratified_advantages,
    virtual_maximum_advantages,
)

NAN = float("nan")


def close(got, want, tol=1e-6):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), atol=tol, rtol=tol)


def test_a_virtual_sample_of_the_highest_reward_by_hand():
    # Group 0 becomes 0 0 1 1; group 1, all wrong, becomes 0 0 1; group 2 was all right and stays so.
    rewards, groups = torch.tensor([0.0, 0, 1, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    wrong = -(1 / 3) / (2 / 9) ** 0.5
    found = virtual_maximum_advantages(rewards, groups, ddof=0, eps=0.0)
    close(found, [-1, -1, 1, wrong, wrong, 0, 0])
    assert (found[5:] == 0).all()
    wrong = -(1 / 3) / (1 / 3) ** 0.5
    close(virtual_maximum_advantages(rewards, groups, ddof=1, eps=0.0)[3:5], [wrong, wrong])
    close(virtual_maximum_advantages(rewards, groups, ddof=0, eps=0.5)[:3], [-0.5, -0.5, 0.5])
    close(virtual_maximum_advantages(torch.tensor([1.0]), [4], maximum=3.0, ddof=0, eps=0.0), [-1])
    close(virtual_maximum_advantages(torch.zeros(2), [0, 0]), [-(1 / 3) / ((1 / 3) ** 0.5 + 1e-4)] * 2)


def test_the_virtual_maximum_moves_with_the_rewards():
    rewards, groups = torch.rand(9, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2] * 3)
    plain = virtual_maximum_advantages(rewards, groups, maximum=1.5, eps=0.0)
    close(virtual_maximum_advantages(4 * rewards + 8, groups, maximum=14.0, eps=0.0), plain, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_reward_written_like_the_maximum_is_the_maximum(dtype):
    found = virtual_maximum_advantages(torch.full((3,), 0.1, dtype=dtype), [0, 0, 0], maximum=0.1, eps=0.0)
    assert (found == 0).all()


def test_a_virtual_maximum_in_every_column():
    rewards = torch.tensor([[0.0, 1.0], [0.0, NAN]])
    close(virtual_maximum_advantages(rewards, [0, 0], ddof=0, eps=0.0), [[-(0.5**0.5), 0], [-(0.5**0.5), 0]])


def test_strata_blend_with_their_group_by_hand():
    rewards = torch.tensor([1.0, 3, 10, 14, 5, 9])
    groups, strata = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 1, 0, 1])
    inside = torch.tensor([-1.0, 1, -1, 1, 0, 0])  # in group 1 each row is alone in its stratum
    whole = torch.tensor([-6.0, -4, 3, 7, -2, 2]) / torch.tensor([27.5**0.5] * 4 + [2.0] * 2)
    found = stratified_advantages(rewards, groups, strata, alpha=0.25, ddof=0, eps=0.0)
    close(found, 0.25 * inside + 0.75 * whole)
    close(stratified_advantages(rewards, groups, strata, alpha=0.0), group_advantages(rewards, groups))
    spread = torch.tensor([-1 / 1.5, 1 / 1.5, -2 / 2.5, 2 / 2.5, 0, 0])
    close(stratified_advantages(rewards, groups, strata, alpha=1.0, ddof=0, eps=0.5), spread)


def test_an_offset_of_a_stratum_does_not_enter_its_own_comparison():
    rewards, groups = torch.tensor([1.0, 3, 10, 14]), [0] * 4
    strata = torch.tensor([5, 5, 2, 2])
    moved = rewards + torch.where(strata == 5, 100.0, 0.0)
    close(
        stratified_advantages(moved, groups, strata, alpha=1.0),
        stratified_advantages(rewards, groups, strata, alpha=1.0),
    )


def test_beta_of_evenly_spread_rates_is_grpo_up_to_a_constant():
    # Rates 1/4 and 3/4: m = 1/2, v = 1/16, so a = b = 3/2 and f = 8/pi sqrt(p (1 - p)).
    rewards, groups = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0]), torch.tensor([0] * 4 + [1] * 4)
    found = beta_advantages(rewards, groups)
    close(found, group_advantages(rewards, groups, ddof=0, eps=0.0) * math.pi / 8)
    assert found[0] > 0 > found[1]


def test_beta_by_moments_and_density():
    rates, size = [0.2, 0.4, 0.9], 10
    rewards = torch.cat([(torch.arange(size) < round(p * size)).float() for p in rates])
    groups = torch.arange(3).repeat_interleave(size)
    mean = sum(rates) / 3
    variance = sum((p - mean) ** 2 for p in rates) / 3
    spread = mean * (1 - mean) / variance - 1
    law = torch.distributions.Beta(1 + spread * mean / 3, 1 + spread * (1 - mean) / 3)
    p = torch.tensor(rates).repeat_interleave(size)
    close(beta_advantages(rewards, groups), (rewards - p) / law.log_prob(p).exp(), 1e-5)


def test_beta_of_equal_rates_and_of_outcomes_that_agree():
    # One rate of 1/2: f = 4/pi. Rates 0 and 1 alone say nothing.
    close(beta_advantages(torch.tensor([1.0, 0, 0, 1]), [0, 0, 1, 1]), [math.pi / 8 * s for s in (1, -1, -1, 1)])
    assert (beta_advantages(torch.tensor([1.0, 1, 0, 0]), [0, 0, 1, 1]) == 0).all()


def test_beta_counts_a_group_of_one():
    # Rates 1/2 and 1: m = 3/4, v = 1/16, so a = 3/2 and b = 1/2; f is that of Beta(3/2, 7/6) at 1/2.
    density = torch.distributions.Beta(1.5, 7 / 6).log_prob(torch.tensor(0.5)).exp().item()
    close(beta_advantages(torch.tensor([1.0, 0, 1]), [0, 0, 1]), [0.5 / density, -0.5 / density, 0], 1e-5)


def test_beta_treats_several_rewards_apart():
    rewards = torch.tensor([[1.0, 0], [0, 0], [1, 1], [0, NAN], [0, 1], [1, 0]])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    found = beta_advantages(rewards, groups)
    for k in range(2):
        close(found[:, k], beta_advantages(rewards[:, k], groups))


def test_steps_from_one_state_are_compared_by_hand():
    returns = torch.tensor([1.0, 3, 9, 7])
    groups, states = torch.tensor([0, 0, 0, 1]), torch.tensor([5, 5, 8, 5])
    episode = torch.tensor([0.1, 0.2, 0.3, 0.4])
    found = anchor_state_advantages(returns, groups, states, episode, weight=0.5, ddof=0, eps=0.0)
    close(found, [-0.4, 0.7, 0.3, 0.4])
    found = anchor_state_advantages(returns * 3, groups, states, episode, scale="none")
    close(found, [-2.9, 3.2, 0.3, 0.4])
    found = anchor_state_advantages(returns, groups, states, episode, ddof=0, eps=1.0)
    close(found, [-0.4, 0.7, 0.3, 0.4])
    found = anchor_state_advantages(returns, groups, states, episode.clone().requires_grad_())
    pair = 1 / (2**0.5 + 1e-4)
    close(found, [0.1 - pair, 0.2 + pair, 0.3, 0.4])
    assert not found.requires_grad
    found = anchor_state_advantages(torch.tensor([1.0, 3, 5]), [0] * 3, [7] * 3, torch.zeros(3))
    close(found, [-2 / (2 + 1e-4), 0, 2 / (2 + 1e-4)])
    returns[1], episode[3] = NAN, NAN
    close(anchor_state_advantages(returns, groups, states, episode), [0.1, 0.2, 0.3, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: virtual_maximum_advantages(torch.tensor([2.0]), [0]), "a value above `maximum`, 1.0"),
        (lambda: virtual_maximum_advantages(torch.tensor([-math.inf]), [0]), "`rewards` holds an infinite value"),
        (lambda: virtual_maximum_advantages(torch.tensor(2.0), [0]), "`rewards` is a scalar"),
        (lambda: stratified_advantages(torch.zeros(2), [0, 0], [0, 0], alpha=1.5), "`alpha` is 1.5; use a weight from"),
        (lambda: stratified_advantages(torch.zeros(2), [0, 0], [0, 0], alpha=-0.1), "`alpha` is -0.1"),
        (lambda: stratified_advantages(torch.zeros(2), [0, 0], [0]), r"`strata` has shape \(1,\); give one value per"),
        (lambda: beta_advantages(torch.tensor([0.5]), [0]), "neither 0 nor 1"),
        (lambda: anchor_state_advantages(torch.zeros(2), [0, 0], [0], torch.zeros(2)), "`states` has shape"),
        (lambda: anchor_state_advantages(torch.zeros(2), [0, 0], [0, 0], torch.zeros(1)), "`episode` has shape"),
        (lambda: anchor_state_advantages(torch.zeros(2, 1), [0, 0], [0, 0], torch.zeros(2)), "`returns` has shape"),
        (
            lambda: anchor_state_advantages(torch.zeros(2), [0, 0], [0, 0], torch.zeros(2), scale="batch"),
            "`scale` is 'batch'; use 'group' or 'none'",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
