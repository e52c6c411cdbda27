"""Selection within groups, against cases worked out by hand and invariances."""

import math

import pytest
import torch

from flowgrpo.core.selection import select


def test_the_best_and_the_worst_are_kept():
    values = torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0])
    assert select(values, [0] * 5, 4).tolist() == [True, True, False, True, True]
    # Of an odd number one more comes from the top.
    assert select(values, [0] * 5, 3).tolist() == [True, True, False, False, True]
    assert select(values, [0] * 5, 1).tolist() == [True, False, False, False, False]


def test_best_keeps_the_top():
    values = torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0])
    assert select(values, [0] * 5, 2, choice="best").tolist() == [True, False, False, False, True]


def test_groups_are_ranked_apart_in_any_order_and_small_ones_kept_whole():
    values = torch.tensor([0.0, 10.0, 1.0, 11.0, 2.0, 7.0])
    groups = torch.tensor([4, 9, 4, 9, 4, 2])
    assert select(values, groups, 2).tolist() == [True, True, False, True, True, True]


def test_a_value_that_is_missing_is_never_kept_and_makes_no_room():
    values = torch.tensor([math.nan, 1.0, 2.0, 3.0, math.nan])
    assert select(values, [0] * 5, 2).tolist() == [False, True, False, True, False]
    assert select(values, [0] * 5, 5).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("choice", ["extremes", "best"])
def test_the_count_is_exact_also_among_equals_and_follows_a_permutation(choice):
    torch.manual_seed(1)
    groups = torch.arange(4).repeat_interleave(7)
    values = torch.randint(0, 3, (28,)).float()
    assert select(values, groups, 4, choice=choice).view(4, 7).sum(1).tolist() == [4] * 4
    distinct, order = torch.rand(28), torch.randperm(28)
    assert torch.equal(
        select(distinct, groups, 4, choice=choice)[order], select(distinct[order], groups[order], 4, choice=choice)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select(torch.zeros(2), [0, 0], 0), "`keep` is 0; keep at least 1"),
        (lambda: select(torch.zeros(2), [0, 0], 1, choice="worst"), "`choice` is 'worst'; use one of extremes, best"),
        (lambda: select(torch.zeros(2, 1), [0, 0], 1), r"shape \(2, 1\)"),
        (lambda: select(torch.zeros(2), [0], 1), "`groups` has shape"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
