"""Budgets against every possible allocation of small cases, and the formulas behind them."""

import itertools
import math
import random
from functools import partial

import pytest

from flowgrpo.core.budgets import GAINS, allocate, interval_gain, knapsack_gain, variance_gain


def knapsack_value(p, n):
    return p * (1 - p) ** 2 * (1 - p**n - (1 - p) ** n)


VALUES = {
    "knapsack": knapsack_value,
    "interval": lambda s, n: -s / math.sqrt(n),
    "variance": lambda s, n: -(s**2) / n,
}


def best_of_all(statistics, budget, value, least, most):
    sizes = itertools.product(range(least, most + 1), repeat=len(statistics))
    return max(sum(map(value, statistics, s)) for s in sizes if sum(s) == budget)


@pytest.mark.parametrize("name", sorted(GAINS))
def test_a_gain_is_the_difference_of_the_value_and_never_rises(name):
    for statistic in (0.0, 0.1, 0.5, 0.9, 1.0):
        gains = [GAINS[name](statistic, n) for n in range(1, 40)]
        want = [VALUES[name](statistic, n + 1) - VALUES[name](statistic, n) for n in range(1, 40)]
        assert gains == pytest.approx(want, abs=1e-12)
        assert all(a >= b - 1e-15 for a, b in itertools.pairwise(gains))


@pytest.mark.parametrize("name", sorted(GAINS))
@pytest.mark.parametrize(("least", "most"), [(1, 9), (2, 4), (1, 3)])
def test_the_allocation_is_the_best_of_all(name, least, most):
    chance = random.Random(0)
    for _ in range(5):
        statistics = [chance.choice([0.0, 1.0, chance.random()]) for _ in range(4)]
        budget = chance.randint(4 * least, min(4 * most, 14))
        sizes = allocate(statistics, budget, GAINS[name], least=least, most=most)
        assert sum(sizes) == budget
        assert all(least <= n <= most for n in sizes)
        got = sum(map(VALUES[name], statistics, sizes))
        assert got == pytest.approx(best_of_all(statistics, budget, VALUES[name], least, most), abs=1e-12)


def test_knapsack_by_hand():
    """p = 1/2 and p = 1/10, at two samples each: 1/8 (1/4) against 0.081 (0.9 0.1); later the rare one leads."""
    assert knapsack_gain(0.5, 2) == pytest.approx(0.125 * 0.25)
    assert knapsack_gain(0.1, 2) == pytest.approx(0.1 * 0.81 * (0.01 * 0.9 + 0.81 * 0.1))
    sizes = allocate([0.5, 0.1, 1.0, 0.0], 40, least=2)
    assert sum(sizes) == 40
    assert sizes[2:] == [2, 2]
    assert sizes[1] > sizes[0] > 2


def test_hard_prompts_are_worth_more_than_easy_ones_as_rare():
    hard, easy = allocate([0.1, 0.9], 30)
    assert hard > easy


def test_the_variance_rule_gives_sizes_in_proportion_to_the_deviation():
    assert allocate([1.0, 2.0, 3.0], 60, variance_gain) == [10, 20, 30]


def test_the_interval_rule_is_gentler():
    sizes = allocate([1.0, 8.0], 100, interval_gain)
    assert sizes == [20, 80]  # in proportion to std^(2/3)


def test_a_bonus_spreads_what_uncertainty_would_hoard():
    plain = allocate([0.0, 1.0], 20, interval_gain)
    assert plain == [1, 19]
    explored = allocate([0.0, 1.0], 20, partial(interval_gain, bonus=0.5))
    assert 1 < explored[0] < explored[1]
    assert interval_gain(0.0, 4, bonus=0.6) == pytest.approx(0.3)


def test_what_is_left_over_is_spread_evenly():
    assert allocate([0.0, 1.0, 0.0], 10) == [4, 3, 3]
    assert allocate([0.5, 0.0, 1.0], 12, most=5) == [5, 4, 3]


def test_the_limits_can_be_tight_and_the_budget_is_always_met():
    assert allocate([0.3, 0.6], 8, least=4, most=4) == [4, 4]
    assert allocate([0.3, 0.6], 2) == [1, 1]
    assert allocate([], 0) == []
    chance = random.Random(1)
    rates = [chance.random() for _ in range(200)]
    sizes = allocate(rates, 3200, least=2, most=93)
    assert sum(sizes) == 3200
    assert min(sizes) >= 2
    assert max(sizes) <= 93


def test_prompts_may_come_in_any_order():
    chance = random.Random(2)
    rates = [chance.random() for _ in range(12)]
    order = chance.sample(range(12), 12)
    sizes = allocate(rates, 100)
    assert allocate([rates[i] for i in order], 100) == [sizes[i] for i in order]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: allocate([0.5], 0), "`budget` is 0, but 1 prompts of `least` 1 take 1 or more"),
        (lambda: allocate([0.5, 0.5], 9, most=4), "take 2 to 8"),
        (lambda: allocate([0.5, 0.5], 3, least=2), "take 4 or more"),
        (lambda: allocate([0.5], 3, least=0), "least=0"),
        (lambda: allocate([0.5], 3, least=3, most=2), "most=2"),
        (lambda: allocate([math.nan], 3), "not finite"),
        (lambda: allocate([1.5], 3), "success rate is 1.5"),
        (lambda: allocate([-0.1], 3), "success rate is -0.1"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
