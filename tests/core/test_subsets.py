"""Subsets of groups against every possible subset of small cases, and rules by hand."""

import itertools
import math

import pytest
import torch

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.subsets import balanced, degenerate_rows, finished, rank_in_group, widest

NAN = math.nan


def greatest_variance(values, keep):
    return max(torch.tensor(c, dtype=torch.float64).var(correction=0) for c in itertools.combinations(values, keep))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_the_widest_subset_is_the_widest_of_all(seed, keep):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(21, generator=g, dtype=torch.float64).exp()
    if seed == 3:
        values = (2 * values).round()
    groups = torch.randperm(21, generator=g) % 3
    kept = widest(values, groups, keep)
    for group in range(3):
        inside = groups == group
        assert (kept & inside).sum() == keep
        got = values[kept & inside].var(correction=0)
        torch.testing.assert_close(got, greatest_variance(values[inside].tolist(), keep))


def test_widest_by_hand():
    values = torch.tensor([0.0, 0.1, 0.2, 9.0, 10.0, 0.3])
    assert widest(values, [0] * 6, 3).tolist() == [True, True, False, False, True, False]
    assert widest(-values, [0] * 6, 3).tolist() == [True, True, False, False, True, False]
    assert widest(values, [0] * 6, 4).tolist() == [True, True, False, True, True, False]
    # All of one outlier: 1 high and 3 low, which best and worst in equal parts would miss.
    lone = torch.tensor([5.0, 0.0, 0.0, 0.1, 0.2])
    assert widest(lone, [0] * 5, 3).tolist() == [True, True, True, False, False]


def test_a_large_offset_does_not_drown_small_differences():
    values = 1e8 + torch.tensor([0.0, 0.1, 0.2, 0.9, 1.0, 0.3], dtype=torch.float64)
    assert widest(values, [0] * 6, 3).sum() == 3
    assert widest(values, [0] * 6, 4).tolist() == [True, True, False, True, True, False]


def test_a_missing_value_is_never_kept_and_small_groups_are_whole():
    values = torch.tensor([NAN, 1.0, 2.0, 3.0, 4.0, 7.0, NAN, NAN])
    groups = [0, 0, 0, 0, 0, 1, 1, 2]
    assert widest(values, groups, 2).tolist() == [False, True, False, False, True, True, False, False]
    assert widest(values, groups, 9).tolist() == (~values.isnan()).tolist()


def test_widest_follows_a_permutation():
    g = torch.Generator().manual_seed(5)
    values, groups, order = torch.rand(30, generator=g), torch.arange(30) % 4, torch.randperm(30, generator=g)
    kept = widest(values, groups, 4)
    assert torch.equal(widest(values[order], 9 - groups[order], 4), kept[order])


def test_ranks():
    values = torch.tensor([3.0, 1.0, NAN, 1.0, 2.0, -math.inf])
    index = torch.tensor([1, 0, 1, 0, 1, 1])
    assert rank_in_group(values, index, 2).tolist() == [2, 0, 3, 1, 1, 0]
    assert rank_in_group(torch.tensor([NAN, math.inf, 1.0]), torch.zeros(3, dtype=torch.long), 1).tolist() == [2, 1, 0]


REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, NAN])
GROUPS = [0, 0, 0, 0, 3, 3, 7, 7]


def test_a_group_is_finished_with_enough_of_both():
    assert finished(REWARDS, GROUPS).tolist() == [True, False, False]
    assert finished(REWARDS, GROUPS, positives=1, negatives=0).tolist() == [True, True, True]
    assert finished(REWARDS, GROUPS, positives=2, negatives=0).tolist() == [False, True, False]
    assert finished(REWARDS, GROUPS, positives=1, negatives=3).tolist() == [True, False, False]
    assert finished(REWARDS, GROUPS, positives=1, negatives=4).tolist() == [False, False, False]


def test_or_with_too_many_drawn():
    assert finished(REWARDS, GROUPS, positives=9, most=4).tolist() == [True, False, False]
    assert finished(REWARDS, GROUPS, positives=9, most=2).tolist() == [True, True, True]
    graded = torch.tensor([0.3, 0.6, 0.7])
    assert finished(graded, [0, 0, 0]).tolist() == [True]
    assert finished(graded, [0, 0, 0], success=0.7).tolist() == [True]
    assert finished(graded, [0, 0, 0], success=0.71).tolist() == [False]


def test_balanced_keeps_halves_as_far_as_it_can():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    same = [4] * 7
    assert balanced(rewards, same, 4).tolist() == [True, True, True, True, False, False, False]
    assert balanced(rewards, same, 5).tolist() == [True, True, True, True, False, True, False]
    assert balanced(rewards, same, 6).tolist() == [True, True, True, True, True, True, False]
    assert balanced(rewards, same, 9).all()
    rare = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    assert balanced(rare, [0] * 5, 4).tolist() == [True, True, True, False, True]
    assert balanced(1 - rare, [0] * 5, 4).tolist() == [True, True, True, False, True]
    assert balanced(torch.zeros(5), [0] * 5, 2).tolist() == [True, True, False, False, False]


def test_balanced_judges_groups_apart_and_never_keeps_a_missing_reward():
    rewards = torch.tensor([NAN, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, NAN])
    groups = [0, 1, 0, 1, 0, 1, 1, 1]
    assert balanced(rewards, groups, 2).tolist() == [False, True, True, True, True, False, False, False]


def test_the_baseline_comes_from_all_that_were_drawn():
    """One success of eight: its advantage is 7/8, whichever are kept. Among only the four kept it would be 3/4."""
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    kept = balanced(rewards, [0] * 8, 4)
    advantages = group_advantages(rewards, [0] * 8, scale="none")[kept]
    assert advantages.tolist() == [-0.125, -0.125, -0.125, 0.875]


def test_groups_without_a_signal():
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.2, 0.3, NAN, NAN, 0.7, NAN])
    groups = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    by_group = {
        "equal": [True, True, False, False, True, True],
        "failed": [True, False, False, True, True, False],
        "solved": [False, True, False, False, True, True],
    }
    for which, want in by_group.items():
        assert degenerate_rows(rewards, groups, which=which)[::2].tolist() == want
        assert torch.equal(
            degenerate_rows(rewards, groups, which=which)[::2], degenerate_rows(rewards, groups, which=which)[1::2]
        )
    assert degenerate_rows(rewards, groups, which="failed", success=0.3)[::2].tolist() == [
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    assert degenerate_rows(rewards, groups, which="solved", success=0.2)[::2].tolist()[3] is True


def test_rows_without_a_signal_are_those_of_advantage_zero():
    g = torch.Generator().manual_seed(0)
    rewards, groups = torch.randint(0, 2, (40,), generator=g).float(), torch.arange(40) // 2
    silent = degenerate_rows(rewards, groups)
    assert torch.equal(silent, group_advantages(rewards, groups) == 0)
    assert 0 < silent.sum() < 40


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: widest(torch.zeros(2), [0, 0], 0), "`keep` is 0"),
        (lambda: balanced(torch.zeros(2), [0, 0], 0), "`keep` is 0"),
        (lambda: widest(torch.zeros(2, 1), [0, 0], 1), r"shape \(2, 1\)"),
        (lambda: finished(torch.zeros(2), [0]), "`groups` has shape"),
        (lambda: degenerate_rows(torch.zeros(2), [0, 0], which="bad"), "`which` is 'bad'"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
