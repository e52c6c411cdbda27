"""Win rates from comparisons, counted by hand."""

import pytest
import torch

from flowgrpo.core.comparisons import win_rates

NAN = float("nan")


def close(got, want, tol=1e-6):
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want, atol=tol, rtol=tol, equal_nan=True)


def test_share_of_wins_by_hand():
    matrix = torch.tensor([[NAN, 1.0, 0.5], [0.0, 9.0, 1.0], [0.5, 0.0, 0.3]])  # what the diagonal holds is ignored
    close(win_rates(matrix), [0.75, 0.5, 0.25])


def test_preferences_may_run_in_circles():
    circle = torch.tensor([[0.5, 1.0, 0.0], [0.0, 0.5, 1.0], [1.0, 0.0, 0.5]])
    close(win_rates(circle), [0.5] * 3)


def test_a_liking_for_the_first_cancels_out_and_one_order_is_enough():
    close(win_rates(torch.tensor([[NAN, 0.9], [0.9, NAN]])), [0.5, 0.5])
    close(win_rates(torch.tensor([[NAN, 0.8], [NAN, NAN]])), [0.8, 0.2])
    close(win_rates(torch.tensor([[NAN, 0.9], [0.3, NAN]])), [0.8, 0.2])


def test_samples_that_were_not_compared_are_left_out():
    matrix = torch.full((3, 3), NAN)
    matrix[0, 1] = 1.0
    close(win_rates(matrix), [1, 0, NAN])
    close(win_rates(torch.full((1, 1), 0.5)), [NAN])


def test_win_rates_add_up_to_half_the_samples_and_follow_a_permutation():
    matrix = torch.rand(4, 5, 5, generator=torch.Generator().manual_seed(0))
    found = win_rates(matrix)
    close(found.sum(1), [2.5] * 4)
    order = torch.tensor([3, 0, 4, 1, 2])
    close(win_rates(matrix[:, order][:, :, order]), found[:, order])
    close(win_rates(matrix[2]), found[2])
    close(win_rates(matrix[None, :2]), found[None, :2])
    assert win_rates(matrix.half()).dtype == torch.float32
    assert not win_rates(matrix.requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.zeros(3), r"has shape \(3,\); give a square matrix per group"),
        (torch.zeros(2, 3), r"has shape \(2, 3\)"),
        (torch.zeros(2, 2, 3), r"has shape \(2, 2, 3\)"),
        (torch.tensor([[0.5, 1.1], [0.0, 0.5]]), "a value outside 0..1; give the probability that the row beats"),
        (torch.tensor([[0.5, -0.1], [0.0, 0.5]]), "a value outside 0..1"),
    ],
)
def test_bad_input_is_named(matrix, message):
    with pytest.raises(ValueError, match=message):
        win_rates(matrix)
