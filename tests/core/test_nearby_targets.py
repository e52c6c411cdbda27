"""Targets near a predicted image, by hand, and the loss that fits them."""

import torch

from flowgrpo.core.forward_process import Noised, diffusion_nft
from flowgrpo.core.nearby_targets import target_loss, targets


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_a_straight_gradient_leads_to_the_border_of_the_ball():
    """The norms of the rows are 5 and 2, and two steps of half the radius go straight on."""
    clean = torch.tensor([[3.0, 4.0], [0.0, -2.0]])
    asked = []

    def slope(x):
        asked.append(x)
        return torch.tensor([[2.0, 0.0], [0.0, 0.1]])

    rise, fall = targets(clean, slope, radius=0.1, ascents=2)
    torch.testing.assert_close(rise, torch.tensor([[0.5, 0.0], [0.0, 0.2]]))
    torch.testing.assert_close(fall, -rise)
    # The gradient at the start serves both ways.
    assert len(asked) == 3
    torch.testing.assert_close(torch.stack(asked), torch.stack([clean, clean + rise / 2, clean - rise / 2]))


def test_each_way_follows_its_own_gradient():
    """A reward of x²: the ascent goes away from 0, and the descent towards it and then back."""
    rise, fall = targets(torch.tensor([[1.0]]), lambda x: 2 * x, radius=0.5, ascents=1)
    assert (rise.item(), fall.item()) == (0.5, -0.5)
    clean = torch.tensor([[1.0, 0.0]])
    turning = iter([torch.tensor([[0.0, 3.0]]), torch.tensor([[5.0, 0.0]]), torch.tensor([[0.0, 7.0]])])
    rise, fall = targets(clean, lambda x: next(turning), radius=0.4, ascents=2)
    torch.testing.assert_close(rise, torch.tensor([[0.2, 0.2]]))
    torch.testing.assert_close(fall, torch.tensor([[0.0, -0.4]]))


def test_a_reward_without_a_gradient_moves_nothing():
    rise, fall = targets(torch.ones(2, 1, 3), torch.zeros_like, radius=0.1, ascents=2)
    assert not rise.any()
    assert not fall.any()


def test_the_loss_by_hand():
    """The advantage 2 of a bound of 4 counts 3/4 for the better image and 1/4 for the worse one."""
    moved = double([[0.1, -0.1]]).requires_grad_()
    loss = target_loss(moved, double([[0.3, 0.1]]), double([[-0.4, 0.0]]), double([2.0]), beta=2.0, bound=4.0)
    # The positive prediction is off by -0.1 and -0.3, and the negative one by 0.2 and 0.2.
    by_hand = 4 * (0.75 * (0.01 + 0.09) / 2 / 0.2 + 0.25 * 0.04 / 0.2)
    torch.testing.assert_close(loss.detach(), torch.tensor([by_hand]), check_dtype=False)
    (slope,) = torch.autograd.grad(loss.sum(), moved)
    wanted = [4 * 2.0 * (0.75 * up / 0.2 - 0.25 * 0.2 / 0.2) for up in (-0.1, -0.3)]
    torch.testing.assert_close(slope, double([wanted]), atol=1e-6, rtol=1e-5)


def test_defaults_by_hand():
    loss = target_loss(double([[0.0]]), double([[0.2]]), double([[-0.4]]), double([2.5]))
    torch.testing.assert_close(loss, torch.tensor([5 * (0.75 * 0.2 + 0.25 * 0.4)]), check_dtype=False)


def test_with_the_finished_image_as_both_targets_it_is_diffusion_nft():
    g = torch.Generator().manual_seed(0)
    x0, noise, old, shift = (torch.randn(3, 4, generator=g) for _ in range(4))
    advantage, sigma = torch.tensor([1.0, -2.0, 6.0]), 0.4
    rows = Noised(old + shift, old, None, x0, noise, sigma, advantage, torch.tensor([0, 0, 0]))
    wanted, _ = diffusion_nft(rows, beta=1.0, bound=5.0)
    clean = rows.x - sigma * old
    found = target_loss(-sigma * shift, x0 - clean, x0 - clean, advantage)
    torch.testing.assert_close(found, wanted)
