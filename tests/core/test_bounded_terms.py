"""Rewards that are added within bounds, by hand, and the signs that they must not change."""

import math

import pytest
import torch

from flowgrpo.core.bounded_terms import bounded_shaping, positive_only_advantages, unlikeliness_rewards

NAN = float("nan")


def close(got, want, tol=1e-6):
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want, atol=tol, rtol=tol, equal_nan=True)


REWARDS = torch.tensor([1.0, 1, 0, 0])
CORRECT = torch.tensor([True, True, False, False])
SHORT = torch.tensor([-1.0, -3, 100, NAN])  # among the correct: mean -2, population deviation 1


def positive(weight, short=SHORT, rewards=REWARDS, correct=CORRECT, eps=0.0):
    return positive_only_advantages(rewards, short, correct, [0] * len(rewards), weight=weight, ddof=0, eps=eps)


def test_an_auxiliary_reward_counts_among_the_correct_by_hand():
    close(positive(0.5), [1.5, 0.5, -1, -1])
    close(positive(0.0), [1, 1, -1, -1])
    close(positive(0.5, eps=0.5), [0.5 + 0.5 / 1.5, 0.5 - 0.5 / 1.5, -0.5, -0.5])
    # By default the weight is 1, deviations are those of samples, and 1e-4 is added to them.
    main, extra = 0.5 / ((1 / 3) ** 0.5 + 1e-4), 1 / (2**0.5 + 1e-4)
    found = positive_only_advantages(REWARDS, SHORT.clone().requires_grad_(), CORRECT, [0] * 4)
    close(found, [main + extra, main - extra, -main, -main])
    assert not found.requires_grad


def test_a_correct_sample_is_never_turned_negative():
    close(positive(3.0), [4, 0, -1, -1])
    # All correct: -1 -3 -3 -3. The short one is encouraged, and the long ones do not change.
    everyone = torch.ones(4, dtype=torch.bool)
    close(positive(1.0, torch.tensor([-1.0, -3, -3, -3]), torch.ones(4), everyone), [3**0.5, 0, 0, 0])


def test_a_correct_sample_below_its_group_is_not_pushed_further_down():
    rewards, correct = torch.tensor([1.0, 2, 3]), torch.tensor([True, False, True])
    deviation = (2 / 3) ** 0.5
    close(positive(1.0, torch.tensor([0.0, 0, 9]), rewards, correct), [-1 / deviation, 0, 1 / deviation + 1])
    close(positive(1.0, torch.tensor([9.0, 0, 0]), rewards, correct), [1 - 1 / deviation, 0, 1 / deviation - 1])


def test_what_incorrect_samples_hold_has_no_influence():
    found = positive(1.0, torch.tensor([-1.0, -3, -70, 12345]))
    close(found, positive(1.0))
    # A row without a reward is no correct sample either.
    rewards = torch.tensor([1.0, 1, 0, 0, NAN])
    more = positive(1.0, torch.tensor([-1.0, -3, 0, 0, 50]), rewards, torch.tensor([True, True, False, False, True]))
    close(more, [*positive(1.0), 0])


def test_a_signal_is_added_within_bounds_by_hand():
    advantages, signal = torch.tensor([2.0, -2, 1, 0]), torch.tensor([4.0, 0, 0, 0])  # less its mean: 3 -1 -1 -1
    close(bounded_shaping(advantages, signal, [0] * 4, strength=0.1, bound=0.5), [2.3, -2.1, 0.9, 0])
    close(bounded_shaping(advantages, signal, [0] * 4, strength=1.0, bound=0.5), [3, -3, 0.5, 0])
    close(bounded_shaping(advantages, signal, [0] * 4, strength=-1.0, bound=0.25), [1.5, -1.5, 1.25, 0])
    close(bounded_shaping(advantages, signal, [0] * 4, bound=0.0), advantages)


def test_the_mean_of_a_signal_is_that_of_its_group_without_nan():
    advantages, signal = torch.full((5,), 100.0), torch.tensor([1.0, 3, NAN, 10, 20])
    close(bounded_shaping(advantages, signal, [0, 0, 0, 1, 1]), [99, 101, 100, 95, 105])
    advantages[0] = NAN
    close(bounded_shaping(advantages, signal, [0, 0, 0, 1, 1]), [0, 101, 100, 95, 105])


def test_shaping_never_turns_a_sign():
    g = torch.Generator().manual_seed(0)
    advantages, signal = torch.randn(50, generator=g), 100 * torch.randn(50, generator=g)
    found = bounded_shaping(advantages, signal, torch.arange(50) % 5, bound=0.9)
    assert torch.equal(found.sign(), advantages.sign())
    assert ((found - advantages).abs() <= 0.9 * advantages.abs() + 1e-6).all()


def test_likely_successes_earn_less_by_hand():
    rewards, log_prob = torch.tensor([1.0, 2, 0, 1]), torch.tensor([-2.0, -1, -3, -4])
    close(unlikeliness_rewards(rewards, log_prob, [0] * 4, beta=0.4), [0.8, 1.4, 0, 1])
    close(unlikeliness_rewards(rewards, log_prob, [0] * 4, beta=0.0), rewards)
    # Groups are ranked apart.
    close(unlikeliness_rewards(rewards, log_prob, [0, 0, 1, 1], beta=0.4), [1, 1.6, 0, 1])


def test_equal_log_probs_share_a_rank_and_failures_stay():
    rewards = torch.tensor([1.0, 1, -1, NAN])
    close(unlikeliness_rewards(rewards, torch.tensor([-1.0, -1, -5, NAN]), [0] * 4, beta=0.6), [0.7, 0.7, -1, NAN])
    close(unlikeliness_rewards(torch.ones(1), torch.zeros(1), [0], beta=1.0), [1])


def test_unlikeliness_follows_a_permutation():
    g = torch.Generator().manual_seed(0)
    rewards, log_prob = torch.rand(12, generator=g), torch.randint(-3, 0, (12,), generator=g).float()
    groups, order = torch.randint(0, 3, (12,), generator=g), torch.randperm(12, generator=g)
    found = unlikeliness_rewards(rewards, log_prob, groups)
    close(unlikeliness_rewards(rewards[order], log_prob[order], 7 - groups[order]), found[order])
    assert not unlikeliness_rewards(rewards.requires_grad_(), log_prob.requires_grad_(), groups).requires_grad
    assert unlikeliness_rewards(torch.zeros(0), torch.zeros(0), []).shape == (0,)


TWO = torch.zeros(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: positive_only_advantages(TWO, TWO, TWO, [0, 0], weight=-1.0),
            "`weight` is -1.0; use 0 or more, and change",
        ),
        (lambda: positive_only_advantages(TWO, TWO[:1], TWO, [0, 0]), "`auxiliary` has shape"),
        (lambda: positive_only_advantages(TWO, TWO, TWO[:1], [0, 0]), "`correct` has shape"),
        (lambda: bounded_shaping(TWO, TWO, [0, 0], bound=1.0), "`bound` is 1.0; use 0 <= bound"),
        (lambda: bounded_shaping(TWO, TWO, [0, 0], bound=-0.1), "`bound` is -0.1"),
        (lambda: bounded_shaping(TWO, TWO[:1], [0, 0]), "`signal` has shape"),
        (lambda: bounded_shaping(TWO, TWO + math.inf, [0, 0]), "`signal` holds an infinite value"),
        (lambda: bounded_shaping(TWO[:, None], TWO, [0, 0]), r"`advantages` has shape \(2, 1\)"),
        (lambda: unlikeliness_rewards(TWO, TWO, [0, 0], beta=1.1), "`beta` is 1.1; use a share from 0 to 1"),
        (lambda: unlikeliness_rewards(TWO, TWO, [0, 0], beta=-0.1), "`beta` is -0.1"),
        (lambda: unlikeliness_rewards(TWO, TWO[:1], [0, 0]), "`log_prob` has shape"),
        (lambda: unlikeliness_rewards(TWO, TWO + NAN, [0, 0]), "`log_prob` is NaN where `rewards` is not"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
