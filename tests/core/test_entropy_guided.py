"""Losses that follow the entropy of a token: means in a window, HAPO's clip and advantages, ARES's relaxed KL."""

import math
from functools import partial

import pytest
import torch

from flowgrpo.core.entropy_guided import hapo, relative_entropy, window_means
from flowgrpo.core.objectives import held_columns
from flowgrpo.core.surrogates import clip
from flowgrpo.core.token_penalties import kl, window_kl

NAN = math.nan
ENTROPY = torch.tensor([[0.2, 0.6, 1.8]])
"""With a mean of 0.6: relative entropies of -0.5, 0 and 0.5."""


def ratios(*values: float) -> torch.Tensor:
    return torch.tensor([values]).log().requires_grad_()


def test_twice_and_half_of_the_mean_are_equally_far_from_it():
    found = relative_entropy(torch.tensor([0.0, 0.25, 0.5, 1.0, 1e9]), 0.5)
    torch.testing.assert_close(found, torch.tensor([-1.0, -1 / 3, 0.0, 1 / 3, 1.0]))
    assert relative_entropy(torch.zeros(2), 0.0).tolist() == [0.0, 0.0]
    torch.testing.assert_close(found[3], torch.tensor(math.log(2) / 2).tanh())


def test_a_window_begins_at_its_token_and_ends_with_the_row():
    values = torch.tensor([[1.0, 3.0, 5.0, 9.0], [2.0, NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    assert window_means(values, mask, 2).tolist() == [[2.0, 4.0, 7.0, 9.0], [2.0, 0.0, 0.0, 0.0]]
    assert window_means(values, mask, 1).nan_to_num().tolist() == values.nan_to_num().tolist()
    assert window_means(values, mask, 9)[0, 0] == 4.5
    hole = torch.tensor([[1, 0, 1, 1]])
    assert window_means(values[:1], hole, 3).tolist() == [[3.0, 0.0, 7.0, 9.0]]
    with pytest.raises(ValueError, match="`size` is 0"):
        window_means(values, mask, 0)
    with pytest.raises(ValueError, match=r"`mask` \(4,\)"):
        window_means(values, mask[0], 2)


@pytest.mark.parametrize(
    ("ratio", "adv", "bound"),
    [
        # a sure token: the lower bound is 1 - 0.2 * 1.5, and the upper one is as it was
        ((0.75, 0.75, 0.75), -1.0, (0.75, 0.8, 0.8)),
        ((0.6, 0.6, 0.6), -1.0, (0.7, 0.8, 0.8)),
        # an unsure token: the upper bound is 1 + 0.2 * 1.5, and the lower one is as it was
        ((1.25, 1.25, 1.25), 1.0, (1.2, 1.2, 1.25)),
        ((1.4, 1.4, 1.4), 1.0, (1.2, 1.2, 1.3)),
    ],
)
def test_the_clip_is_wide_downwards_for_sure_and_upwards_for_unsure_tokens(ratio, adv, bound):
    leaf, mask = ratios(*ratio), torch.ones(1, 3)
    loss = hapo(leaf, torch.tensor([adv]), leaf, mask, entropy=ENTROPY, mean_entropy=0.6, high=0.2, lean=0.0)
    torch.testing.assert_close(loss.detach(), -adv * torch.tensor([bound]))
    held = [one != other for one, other in zip(ratio, bound)]
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    assert (grad[0] == 0).tolist() == held
    bent = partial(hapo, entropy=ENTROPY, mean_entropy=0.6, high=0.2, lean=0.0)
    start = torch.zeros(1, 3)
    assert held_columns(leaf, start, torch.tensor([adv]), mask, surrogate=bent).tolist() == [held]


def test_sure_tokens_count_less_until_they_move_and_unsure_ones_more_once_they_move():
    still, far = ratios(1.0, 1.0, 1.0), ratios(1.15, 1.15, 1.15)
    bent = {"entropy": ENTROPY, "mean_entropy": 0.6, "high": 0.2}
    one = torch.ones(1)
    near = hapo(still, one, still, torch.ones(1, 3), **bent)
    torch.testing.assert_close(near.detach(), -torch.tensor([[0.5, 1.0, 1.0]]))
    moved = hapo(far, one, far, torch.ones(1, 3), **bent)
    torch.testing.assert_close(moved.detach(), -1.15 * torch.tensor([[1.0, 1.0, 1.5]]))
    part = hapo(far, one, far, torch.ones(1, 3), **bent, lean=0.4)
    torch.testing.assert_close(part.detach(), -1.15 * torch.tensor([[1.0, 1.0, 1.2]]))


def test_without_spread_and_lean_it_is_the_plain_clip():
    leaf, adv = ratios(0.5, 1.1, 2.0), torch.tensor([[1.0, -1.0, 1.0]])
    mine = hapo(leaf, adv, leaf, None, entropy=ENTROPY, mean_entropy=0.6, low=0.2, high=0.3, spread=0.0, lean=0.0)
    torch.testing.assert_close(mine, clip(leaf, adv, leaf, None, low=0.2, high=0.3))


@pytest.mark.parametrize("options", [{"low": 0.5}, {"high": -0.1}, {"spread": 1.1}, {"lean": -0.1}])
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=r"low \* \(1 \+ spread\) < 1"):
        hapo(torch.zeros(1, 3), torch.ones(1), torch.zeros(1, 3), None, entropy=ENTROPY, mean_entropy=0.6, **options)


def test_the_kl_is_relaxed_where_a_window_is_uncertain():
    """Windows of two tokens have the means 0.4, 1.2 and 1.8. One uncertain token alone relaxes nothing."""
    logp, ref, mask = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-2.0, -2.5, -1.0]]), torch.ones(1, 3)
    found = window_kl(logp, ref, ENTROPY, mask, window=2, threshold=1.3, relaxed=0.25)
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.125, 0.5]]))
    far = window_kl(logp, ref, ENTROPY, mask, window=2, threshold=1.0, relaxed=0.0)
    torch.testing.assert_close(far, torch.tensor([[0.5, 0.0, 0.0]]))
    torch.testing.assert_close(window_kl(logp, ref, ENTROPY, mask, relaxed=1.0), kl(logp, ref, logp))
