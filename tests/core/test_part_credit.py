"""Returns and advantages of parts, by hand."""

import math

import pytest
import torch

from flowgrpo.core.part_credit import later_returns, part_advantages

NAN = math.nan


def close(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), equal_nan=True)


def test_a_part_has_what_is_scored_from_it_on():
    close(later_returns(torch.tensor([[3.0, 1, 2], [0.5, -1, NAN]])), [[6.0, 3, 2], [-0.5, -1, NAN]])
    # A part in between without a score has those after it.
    close(later_returns(torch.tensor([[NAN, 2.0, NAN, 1, NAN]])), [[3.0, 3, 1, 1, NAN]])
    assert later_returns(torch.ones(2, 3, dtype=torch.float16)).dtype == torch.float32


def test_what_came_before_credits_no_part():
    scores = torch.tensor([[5.0, 1, 2], [7, 1, 2]])
    close(later_returns(scores)[:, 1:].diff(dim=0), [[0.0, 0.0]])


def test_parts_of_one_place_are_compared():
    """In the first group, second parts are 2 and 4, and only one row has a third part. The second group has one row."""
    returns = torch.tensor([[1.0, 2, 9], [1, 4, NAN], [3, 3, 3]])
    found = part_advantages(returns, [0, 0, 1], eps=0.0)
    half = math.sqrt(0.5)
    close(found, [[0.0, -half, 0], [0, half, 0], [0, 0, 0]])
    close(part_advantages(returns, [0, 0, 1], scale="none"), [[0.0, -1, 0], [0, 1, 0], [0, 0, 0]])


def test_all_parts_of_a_group_are_compared():
    """The mean of 1, 2, 9, 1 and 4 is 3.4; the other group is a row with equal parts."""
    returns = torch.tensor([[1.0, 2, 9], [1, 4, NAN], [3, 3, 3]])
    found = part_advantages(returns, [0, 0, 1], among="group", scale="none")
    close(found, [[-2.4, -1.4, 5.6], [-2.4, 0.6, 0], [0, 0, 0]])
    deviation = math.sqrt((2 * 2.4**2 + 1.4**2 + 5.6**2 + 0.6**2) / 4)
    close(part_advantages(returns, [0, 0, 1], among="group", eps=0.0)[0], [-2.4 / deviation, -1.4 / deviation,
                                                                           5.6 / deviation])  # fmt: skip


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: part_advantages(torch.zeros(2), [0, 0]), r"`returns` has shape \(2,\)"),
        (lambda: part_advantages(torch.zeros(2, 2), [0, 0], among="row"), "use one of place, group"),
        (lambda: part_advantages(torch.zeros(2, 2), [0, 0, 1], among="group"), "one group id per row"),
        (lambda: later_returns(torch.zeros(2)), "one reward per step"),
        (lambda: later_returns(torch.tensor([[math.inf]])), "infinite"),
    ],
)
def test_errors(call, said):
    with pytest.raises(ValueError, match=said):
        call()
