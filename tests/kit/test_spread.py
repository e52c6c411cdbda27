"""Figures of scores against values worked out by hand."""

import math

import pytest
import torch
from scipy import stats

from flowgrpo.kit.spread import (
    correlations,
    describe,
    farthest,
    noise_share,
    order_kept,
    order_shared,
    within_spread,
)

NAN = math.nan


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_distribution_by_hand():
    found = describe(tensor(1, 3, 2, 2, NAN), [0, 0, 1, 1, 1])
    assert (found.count, found.absent, found.distinct) == (4, 1, 3)
    assert (found.mean, found.low, found.median, found.high) == (2, 1, 2, 3)
    # Group variances are 2 and 0.
    assert found.within == pytest.approx(1.0)
    assert found.flat_groups == 0.5
    assert found.commonest == 0.5


def test_nothing_is_made_of_no_scores():
    found = describe(tensor(NAN, NAN), [0, 0])
    assert (found.count, found.absent) == (0, 2)
    assert math.isnan(found.mean)
    assert math.isnan(within_spread(tensor(1, 2), [0, 1]))


def test_noise_share_is_one_minus_the_intraclass_correlation_of_shrout_and_fleiss():
    """Their table 2: six targets, four judges; ICC(3,1) is .71."""
    table = [[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]]
    versions = torch.tensor(table, dtype=torch.float64)
    assert 1 - noise_share(versions, [0] * 6) == pytest.approx(0.7148, abs=5e-5)


def test_noise_share_ignores_what_a_version_adds_to_a_whole_group():
    scores = tensor(0, 1, 2, 5, 6, 8)
    groups = [0, 0, 0, 1, 1, 1]
    added = torch.tensor([3.0, 3.0, 3.0, -7.0, -7.0, -7.0], dtype=torch.float64)
    assert noise_share(torch.stack([scores, scores + added], 1), groups) == pytest.approx(0, abs=1e-12)
    assert noise_share(torch.stack([scores, scores.flip(0)], 1), [0] * 6) == 1
    assert math.isnan(noise_share(torch.stack([scores * 0, scores * 0], 1), groups))


def test_noise_share_finds_the_share_that_was_put_in():
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(4000, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(4000, 3, generator=generator, dtype=torch.float64)
    groups = [k // 8 for k in range(4000)]
    assert noise_share(2 * signal + noise, groups) == pytest.approx(1 / 5, abs=0.02)


def test_order_kept_by_hand():
    groups = [0, 0, 0, 1, 1]
    first = tensor(1, 2, 3, 9, 1)
    assert order_kept(first, first * 10 + 4, groups) == 1
    assert order_kept(first, -first, groups) == 0
    assert order_kept(first, first * 0, groups) == 0.5
    # Of the pairs 12, 13, 23 and 45, the first is turned round and the second becomes a tie.
    assert order_kept(first, tensor(3, 1, 3, 2, 1), groups) == pytest.approx((0 + 0.5 + 1 + 1) / 4)
    assert math.isnan(order_kept(tensor(1, 1), tensor(1, 2), [0, 0]))
    assert order_kept(tensor(1, 2, NAN), tensor(1, 2, 3), [0, 0, 0]) == 1


def test_order_kept_is_kendalls_tau_where_there_are_no_ties():
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.rand(30, generator=generator, dtype=torch.float64) for _ in range(2))
    tau = stats.kendalltau(first, second).statistic
    assert order_kept(first, second, [0] * 30) == pytest.approx((1 + tau) / 2)


def test_order_shared_counts_the_pairs_that_both_tell_apart():
    groups = [0, 0, 0, 1, 1]
    first, second = tensor(1, 2, 3, 9, 1), tensor(3, 1, 3, 2, 1)
    # Of the pairs 12, 13, 23 and 45, the first is turned round and the second is a tie.
    assert order_shared(first, second, groups) == order_shared(second, first, groups) == (2 / 3, 3)
    assert order_shared(first, -first, groups) == (0, 4)
    share, pairs = order_shared(first, first * 0, groups)
    assert math.isnan(share)
    assert pairs == 0
    assert order_shared(tensor(1, 2, NAN), tensor(1, 2, 3), [0, 0, 0]) == (1, 1)


def test_correlations():
    assert correlations(tensor(1, 2, 3, NAN), tensor(1, 4, 9, 5)) == pytest.approx((0.98974, 1.0), abs=1e-5)
    assert all(map(math.isnan, correlations(tensor(1, 1, 1), tensor(1, 2, 3))))
    assert all(map(math.isnan, correlations(tensor(1, 2), tensor(1, 2))))


def test_farthest():
    assert farthest(tensor(1, NAN, 3), tensor(1, NAN, 5)) == 2
    assert farthest(tensor(1, NAN), tensor(1, 2)) == math.inf
    assert farthest(tensor(NAN), tensor(NAN)) == 0
