"""Differences within a group, and the ratio of a velocity that moves along them."""

import pytest
import torch

from flowgrpo.core.directions import directions, log_ratio_along


def test_a_pair_is_pulled_along_half_of_its_difference() -> None:
    """Images (3, 0) and (1, 4): half of the difference is (1, -2), whose mean square is 2.5."""
    x = torch.tensor([[3.0, 0.0], [1.0, 4.0]])
    found = directions(x, torch.tensor([7, 7]))
    torch.testing.assert_close(found, torch.tensor([[0.4, -0.8], [-0.4, 0.8]]))


def test_groups_are_apart_whatever_their_order_and_size() -> None:
    x = torch.randn(7, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    group = torch.tensor([5, 2, 5, 2, 5, 2, 9])
    found = directions(x, group)
    assert found.shape == x.shape
    for one in (5, 2):
        mine = x[group == one]
        d = mine - mine.mean(0)
        wanted = (d / d.square().mean((1, 2, 3), keepdim=True)).float()
        torch.testing.assert_close(found[group == one], wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[6], torch.zeros(2, 3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 5, 6, 7])
def test_images_that_are_the_same_have_no_direction(size: int, dtype: torch.dtype) -> None:
    """The mean of several equal numbers is seldom the number itself, and what is divided by is very small here."""
    x = 3.0 * torch.randn(1, 64, generator=torch.Generator().manual_seed(3)).to(dtype).expand(size, 64)
    assert torch.equal(directions(x, torch.full((size,), 4)), torch.zeros(size, 64))


def test_the_difference_of_rewards_along_the_direction_is_the_slope_of_a_linear_reward() -> None:
    """R = g·x: half of R1 - R2, times d, is the part of the gradient g along the difference, times the numbers in x."""
    generator = torch.Generator().manual_seed(1)
    g, x = torch.randn(5, generator=generator), torch.randn(2, 5, generator=generator)
    half, rewards = (x[0] - x[1]) / 2, x @ g
    wanted = (g @ half) * half / half.square().sum() * 5
    d = directions(x, torch.tensor([0, 0]))
    torch.testing.assert_close((rewards[0] - rewards[1]) / 2 * d[0], wanted, rtol=1e-4, atol=1e-5)


def test_the_log_ratio_is_how_much_closer_the_target_is() -> None:
    generator = torch.Generator().manual_seed(2)
    new, old, d = torch.randn(3, 4, 2, 2, generator=generator, dtype=torch.float64)
    target = old - d
    wanted = d.square().mean((1, 2)) - (new - target).square().mean((1, 2))
    torch.testing.assert_close(log_ratio_along(new - old, d), wanted.float(), rtol=1e-5, atol=1e-6)
    moved = torch.zeros(4, 2, 2, requires_grad=True)
    found = log_ratio_along(moved, d)
    assert found.tolist() == [0.0] * 4
    [slope] = torch.autograd.grad(found.sum(), moved)
    torch.testing.assert_close(slope, (-2.0 / 4 * d).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_log_ratio_of_half_precision_is_computed_in_float32(dtype) -> None:
    moved = torch.full((1, 4096), 0.25, dtype=dtype)
    d = torch.full((1, 4096), 2.0, dtype=dtype)
    assert log_ratio_along(moved, d).tolist() == [-(0.25**2 + 2 * 0.25 * 2.0)]
