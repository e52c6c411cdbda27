"""The neighbour policy against the plain definition in float64."""

import pytest
import torch

from flowgrpo.core.neighbours import neighbour_log_ratio, quasi_norm


def case(seed: int = 0, groups: int = 2, size: int = 4):
    torch.manual_seed(seed)
    states = torch.randn(groups * size, 3, 5)
    group = torch.arange(groups).repeat_interleave(size)
    own = torch.arange(groups * size)
    old = states.clone()
    new = old + 0.05 * torch.randn_like(old)
    return new, old, states, group, own


def plain(new, old, states, group, own):
    """log softmax of -|x_j - x|^2 / (2 s^2) for both, subtracted."""
    flat, result = states.double().flatten(1), torch.zeros(len(own), len(states), dtype=torch.float64)
    for a, o in enumerate(own.tolist()):
        members = (group == group[o]).nonzero().flatten()
        spread = (flat[members] - flat[o]).square().mean(1).sum() / (len(members) - 1)
        logs = [
            (-(flat[members] - x[a].double().flatten()).square().mean(1) / (2 * spread)).log_softmax(0)
            for x in (new, old)
        ]
        result[a, members] = logs[0] - logs[1]
    return result


def test_it_is_the_difference_of_two_log_softmaxes():
    new, old, states, group, own = case()
    found = neighbour_log_ratio(new, old, states, group, own)
    torch.testing.assert_close(found.double(), plain(new, old, states, group, own), rtol=1e-4, atol=1e-6)


def test_at_rest_it_is_exactly_nothing_with_a_gradient():
    _, old, states, group, own = case()
    new = old.clone().requires_grad_()
    found = neighbour_log_ratio(new, old, states, group, own)
    assert torch.equal(found, torch.zeros_like(found))
    found[:, 1].sum().backward()
    assert new.grad[group == group[1]].abs().max() > 0


def test_moving_towards_a_neighbour_makes_it_likelier():
    _, old, states, group, own = case()
    new = old + 0.1 * (states[1] - old[0]) * (own == 0).view(-1, 1, 1)
    found = neighbour_log_ratio(new, old, states, group, own)[0]
    assert found[1] == found[group == 0].max()
    assert found[1] > 0 > found[0]


def test_groups_and_latent_size_do_not_matter():
    new, old, states, group, own = case()
    found = neighbour_log_ratio(new, old, states, group, own)
    alone = neighbour_log_ratio(new[:4], old[:4], states[:4], group[:4], own[:4])
    torch.testing.assert_close(found[:4, :4], alone)
    assert (found[:4, 4:] == 0).all()
    twice = [t.repeat(1, 2, 1) for t in (new, old, states)]
    torch.testing.assert_close(neighbour_log_ratio(*twice, group, own), found, rtol=1e-4, atol=1e-6)


def test_a_common_offset_of_all_states_does_not_matter():
    _, _, states, group, own = case()
    states = (states * 64).round() / 64  # so that adding 1024 rounds nothing
    found = neighbour_log_ratio(states + 0.5, states, states, group, own)
    far = states + 1024
    torch.testing.assert_close(neighbour_log_ratio(far + 0.5, far, far, group, own), found, rtol=1e-4, atol=1e-5)


def test_the_sampling_policy_gets_no_gradient():
    new, old, states, group, own = case()
    assert not neighbour_log_ratio(new, old.requires_grad_(), states, group, own).requires_grad


def test_quasi_norm_by_hand():
    """p = 1: 3, -1 sums to 4, times sqrt 2; a group of zeros stays so."""
    found = quasi_norm(torch.tensor([3.0, 0.0, -1.0, 0.0]), torch.tensor([0, 1, 0, 1]), p=1.0)
    torch.testing.assert_close(found, torch.tensor([3.0, 0.0, -1.0, 0.0]) / 4 * 2**0.5)
    small = quasi_norm(torch.tensor([0.25, -0.25]), torch.tensor([0, 0]))  # total 2^(1/0.8) / 4
    torch.testing.assert_close(small, torch.tensor([1.0, -1.0]) * 2**-0.75)


@pytest.mark.parametrize("p", [0.5, 0.8, 2.0])
def test_quasi_norm_is_scale_free(p):
    torch.manual_seed(0)
    advantages, group = torch.randn(6), torch.arange(6) // 3
    torch.testing.assert_close(quasi_norm(7.0 * advantages, group, p=p), quasi_norm(advantages, group, p=p))
