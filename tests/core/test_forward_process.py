"""Forward-process losses: values worked out by hand, the direction of their gradients, and what they must not see."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from flowgrpo.core.forward_process import (
    FORWARD,
    Noised,
    awm,
    crd,
    dgpo,
    diffusion_nft,
    flow_dpo,
    matching,
    preferred,
)
from flowgrpo.core.surrogates import clip, reinforce

PLAIN = partial(clip, low=math.inf, high=math.inf)
METHODS = [partial(FORWARD[name], **({"surrogate": PLAIN} if name in ("awm", "dgpo") else {})) for name in FORWARD]


def rows(velocity: torch.Tensor, advantage: list[float], *, sigma: float = 0.5, old=None, reference=None) -> Noised:
    """Images of zeros and noise of ones: the target velocity is 1 everywhere."""
    return Noised(
        velocity=velocity,
        old=velocity.detach() if old is None else old,
        reference=velocity.detach() if reference is None else reference,
        x0=torch.zeros_like(velocity),
        noise=torch.ones_like(velocity),
        sigma=sigma,
        advantage=torch.tensor(advantage),
        group=torch.zeros(len(velocity), dtype=torch.long),
    )


def random_rows(seed: int = 0, count: int = 4) -> Noised:
    torch.manual_seed(seed)
    v = torch.randn(count, 2, 3, requires_grad=True)
    made = [torch.randn(count, 2, 3) for _ in range(4)]
    old, groups = v.detach() + 0.1 * made[0], torch.arange(count) // 2
    return Noised(v, old, made[1], made[2], made[3], 0.6, torch.randn(count), groups)


def test_nft_by_hand():
    """sigma 1/2, x = 1/2. v = 0, old = 2, beta 1: v+ = 0, v- = 4, so x0+ = 1/2 and x0- = -3/2.

    l = mean square over mean size: 1/2 and 3/2. A = 5 of 5 is wholly good, -5 wholly bad, 0 half of each.
    """
    v = torch.zeros(3, 4, requires_grad=True)
    loss, log_ratio = diffusion_nft(rows(v, [5.0, -5.0, 0.0], old=torch.full((3, 4), 2.0)))
    torch.testing.assert_close(loss, 5.0 * torch.tensor([0.5, 1.5, 1.0]))
    assert log_ratio.tolist() == [0, 0, 0]
    loss.sum().backward()
    # d l+ / d v = 2 (x0+ - x0) (-sigma) / (D w), d l- / d v the same with +sigma: v rises for good, falls for bad.
    torch.testing.assert_close(v.grad[:2, 0], 5.0 * torch.tensor([2 * 0.5 * -0.5 / 4 / 0.5, 2 * -1.5 * 0.5 / 4 / 1.5]))


def one_number(velocity: torch.Tensor, old: float, advantage: list[float], reference=None) -> Noised:
    """x0 = 1/2, noise 2 and sigma 1/4, so x = 7/8 and the target is 3/2."""
    noised = rows(velocity, advantage, sigma=0.25, old=torch.full_like(velocity, old), reference=reference)
    return replace(noised, x0=torch.full_like(velocity, 0.5), noise=torch.full_like(velocity, 2.0))


def test_nft_of_a_mixed_policy_by_hand():
    """v = 1, old = 3, beta 1/2: v+ = 2, v- = 4, so x0+ = 3/8 and x0- = -1/8, 1/8 and 5/8 from x0.

    With a bound of 2, A = 1 is good by 3/4; beyond the bound nothing is more than wholly good or bad.
    """
    loss, _ = diffusion_nft(one_number(torch.ones(3, 1), 3.0, [1.0, 6.0, -6.0]), beta=0.5, bound=2.0)
    torch.testing.assert_close(loss, 4 * torch.tensor([0.75 / 8 + 0.25 * 5 / 8, 1 / 8, 5 / 8]))


def test_nft_of_a_perfect_prediction_is_zero():
    v = torch.full((1, 1), 1.5, requires_grad=True)
    loss, _ = diffusion_nft(one_number(v, 1.5, [1.0]))
    loss.sum().backward()
    assert (loss.item(), v.grad.item()) == (0, 0)


def test_nft_at_the_old_policy_is_a_policy_gradient():
    """With v = v_old the gradient is that of the matching loss times A, so none at A = 0."""
    torch.manual_seed(0)
    v = torch.randn(5, 6, requires_grad=True)
    advantage = [-4.0, -1.0, 0.0, 2.0, 5.0]
    diffusion_nft(rows(v, advantage))[0].sum().backward()
    assert v.grad[2].abs().max() == 0
    towards = (v.grad * (1.0 - v.detach())).sum(1)
    assert (torch.sign(-towards) == torch.tensor(advantage).sign()).all()
    torch.testing.assert_close(v.grad[3].norm() / v.grad[3].norm(), torch.tensor(1.0))


def test_awm_by_hand():
    """v = 3 is 4 off in squares: logp = -sigma / p (4^p). With p = 1/2 and sigma 1/2 that is -2; v = 2: -1."""
    v, old = torch.full((1, 2), 3.0, requires_grad=True), torch.full((1, 2), 2.0)
    loss, log_ratio = awm(rows(v, [2.0], old=old), surrogate=PLAIN, power=0.5)
    torch.testing.assert_close(log_ratio, torch.tensor([-1.0]), atol=2e-5, rtol=0)
    torch.testing.assert_close(loss, torch.tensor([-2.0 * math.exp(-1)]), atol=1e-4, rtol=0)


def test_awm_log_prob_by_hand():
    """Errors 16, 0 and 1 at the default power 1/4: logp = -sigma / p (l^p) less what a perfect one has."""
    v = torch.tensor([[5.5], [1.5]], requires_grad=True)
    loss, log_ratio = awm(one_number(v, 2.5, [-1.0, -1.0]), surrogate=reinforce)
    nothing = 1e-10**0.25
    torch.testing.assert_close(loss, torch.tensor([-(2 - nothing), 0.0]))
    torch.testing.assert_close(log_ratio, torch.tensor([-1.0, 1 - nothing]))
    assert not log_ratio.requires_grad


def test_awm_without_its_factor_and_a_kl_have_the_gradient_of_ram():
    """RAM regresses on v_ref + eta A (target - v), which has no gradient; here that is divided by 2 eta."""
    noised, eta = random_rows(), 100.0
    loss, _ = awm(noised, surrogate=reinforce, power=1.0, scaled=False)
    pull = (noised.velocity - noised.reference).square().flatten(1).mean(1) / eta
    (found,) = torch.autograd.grad((loss + pull).sum(), noised.velocity)
    v = noised.velocity.detach().clone().requires_grad_()
    wanted = noised.reference + eta * noised.advantage[:, None, None] * (noised.noise - noised.x0 - v.detach())
    (expected,) = torch.autograd.grad((v - wanted).square().flatten(1).mean(1).sum(), v)
    torch.testing.assert_close(found, expected / eta, rtol=1e-5, atol=1e-5)


def test_dgpo_weighs_by_both_errors_and_the_weight_has_no_gradient():
    """Errors 1 and 4, the reference's 4 and 1, A = 1 and -2: the mean preference is beta (-3 - 6) / 2."""
    v = torch.tensor([[2.0], [3.0]], requires_grad=True)
    loss, _ = dgpo(rows(v, [1.0, -2.0], reference=torch.tensor([[3.0], [2.0]])), surrogate=PLAIN, beta=0.5)
    weight = 1 / (1 + math.exp(2.25))
    torch.testing.assert_close(loss.detach(), weight * torch.tensor([-1.0, 2.0]))
    loss.sum().backward()
    torch.testing.assert_close(v.grad, weight * torch.tensor([[2.0], [-8.0]]))
    # By default beta is 100.
    loss, _ = dgpo(rows(torch.full((1, 1), 3.0), [0.01], reference=torch.full((1, 1), 2.0)), surrogate=PLAIN)
    torch.testing.assert_close(loss, torch.tensor([-0.01 / (1 + math.exp(-3))]))


def test_dgpo_by_hand():
    """Errors 1 and 4, reference errors 1 and 1, A = 1 and -1: the mean preference is beta (0 - 3) / 2."""
    v = torch.tensor([[2.0], [3.0]], requires_grad=True)
    loss, _ = dgpo(rows(v, [1.0, -1.0], reference=torch.full((2, 1), 2.0)), surrogate=PLAIN, beta=2.0)
    weight = 1 / (1 + math.exp(3.0))
    torch.testing.assert_close(loss.detach(), weight * torch.tensor([-1.0, 1.0]))
    loss.sum().backward()
    # The gradient is w A d error: down for the good one (v 2 falls to 1), up for the bad.
    torch.testing.assert_close(v.grad, weight * torch.tensor([[2.0], [-4.0]]))


def test_crd_by_hand():
    """Errors 1 and 4, the old policy's 4 and 1, so the implicit rewards are 3 and -3, around 0.

    With a bound of 2, A = 1 and -2 are rewards of 3/4 and 0, which are 3/8 and -3/8 from their mean.
    """
    v = torch.tensor([[2.0], [3.0]], requires_grad=True)
    noised = rows(v, [1.0, -2.0], old=torch.tensor([[3.0], [2.0]]))
    loss, log_ratio = crd(noised, beta=0.5, bound=2.0, relative=False)
    assert log_ratio.tolist() == [0, 0]
    torch.testing.assert_close(loss.detach(), 4 * torch.full((2,), (1.5 - 0.375) ** 2))
    loss.sum().backward()
    # d r / d v = -2 (v - 1), and the implicit rewards are too far apart: the good image's error rises, the bad's falls.
    torch.testing.assert_close(v.grad, 4 * 2 * 1.125 * 0.5 * torch.tensor([[-2.0], [4.0]]))
    # Divided by their sizes 1 and 2, the errors are 1 and 2, and the old policy's 2 and 1.
    loss, _ = crd(noised, beta=0.5, bound=2.0)
    torch.testing.assert_close(loss.detach(), 4 * torch.full((2,), (0.5 - 0.375) ** 2))
    wanted = torch.sigmoid(torch.tensor([0.375, -0.375]))
    loss, _ = crd(noised, beta=0.5, bound=2.0, match="logistic")
    ours = torch.sigmoid(torch.tensor([0.5, -0.5]))
    torch.testing.assert_close(loss.detach(), -4 * (wanted * ours.log() + (1 - wanted) * (1 - ours).log()))


def test_the_means_of_crd_may_be_those_of_good_and_of_bad_images():
    """At a low temperature, one loss compares with the best image, and the other with the worst."""
    v = torch.tensor([[2.0], [3.0], [1.0]])
    noised = rows(v, [2.0, -2.0, 0.0], old=torch.tensor([[3.0], [2.0], [1.0]]))
    loss, _ = crd(noised, bound=2.0, relative=False, temperature=1e-4)
    implicit, given = torch.tensor([3.0, -3.0, 0.0]), torch.tensor([1.0, 0.0, 0.5])
    expected = [((implicit - implicit[k]) - (given - given[k])).square() for k in (0, 1)]
    torch.testing.assert_close(loss, 2 * (expected[0] + expected[1]) / 2)


def test_images_with_equal_rewards_are_held_together_by_crd():
    """Nothing tells the images apart, so the loss pulls their implicit rewards to their mean."""
    v = torch.tensor([[2.0], [3.0]], requires_grad=True)
    crd(rows(v, [0.0, 0.0], old=torch.full((2, 1), 2.0)), relative=False)[0].sum().backward()
    # The errors are 1 and 4: the first may rise, and the second must fall.
    assert v.grad[0] < 0 < v.grad[1]


def test_flow_dpo_by_hand():
    """The pair is the best and the worst of three; errors 1 and 4 against 4 and 1: margin = -beta/2 (-3 - 3)."""
    v = torch.tensor([[2.0], [0.5], [3.0]], requires_grad=True)
    reference = torch.tensor([[3.0], [0.5], [2.0]])
    loss, log_ratio = flow_dpo(rows(v, [1.0, 0.0, -1.0], reference=reference), beta=0.5)
    assert log_ratio.tolist() == [0, 0, 0]
    pair = math.log1p(math.exp(-1.5))
    torch.testing.assert_close(loss.detach(), torch.tensor([pair / 2, 0.0, pair / 2]))
    loss.sum().backward()
    assert v.grad[1] == 0
    assert v.grad[0] > 0 > v.grad[2]


def test_the_pair_of_flow_dpo_is_of_the_images_that_are_kept():
    """The best image of the first group and the whole second group are left out; equal advantages are no obstacle."""
    v, reference = torch.randn(7, 2), torch.randn(7, 2)
    groups, advantages = torch.tensor([0, 0, 0, 0, 1, 1, 1]), [2.0, 2.0, 0.5, -1.0, 1.0, 0.0, -1.0]
    kept = torch.tensor([False, True, True, True, False, False, False])
    whole = replace(rows(v, advantages, reference=reference), group=groups, kept=kept)
    loss, _ = flow_dpo(whole)
    assert loss.nonzero().flatten().tolist() == [1, 3]
    alone = replace(rows(v[kept], [2.0, 0.5, -1.0], reference=reference[kept]), group=groups[kept])
    torch.testing.assert_close(loss[kept], flow_dpo(alone)[0])


def test_flow_dpo_has_a_beta_of_a_hundred():
    """Errors 1 and 1 against 1.01 and 1: margin = -50 (-0.01)."""
    reference = torch.tensor([[1 + 1.01**0.5], [2.0]])
    loss, _ = flow_dpo(rows(torch.full((2, 1), 2.0), [1.0, -1.0], reference=reference))
    torch.testing.assert_close(loss, torch.full((2,), math.log1p(math.exp(-0.5)) / 2), rtol=1e-4, atol=0)


def test_groups_without_a_preference_teach_dpo_nothing():
    v = torch.randn(2, 3, requires_grad=True)
    flow_dpo(rows(v, [0.5, 0.5]))[0].sum().backward()
    assert v.grad.abs().max() == 0


def test_matching_is_the_error_of_every_image_whatever_its_advantage():
    v = torch.tensor([[3.0, 1.0], [0.0, 0.0]], requires_grad=True)
    loss, log_ratio = matching(rows(v, [5.0, -5.0]))
    assert loss.tolist() == [2.0, 1.0]
    assert log_ratio.tolist() == [0.0, 0.0]
    loss.sum().backward()
    assert v.grad.tolist() == [[2.0, 0.0], [-1.0, -1.0]]


def test_the_policy_prefers_the_image_whose_error_it_has_lowered_more():
    """The target is 1 everywhere. The reference is at 0, so it has the error 1 on every image."""
    v = torch.tensor([[1.0], [0.5], [0.5], [1.0], [0.7], [0.7], [1.0], [0.0]])
    noised = replace(
        rows(v, [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 0.0], reference=torch.zeros_like(v)),
        group=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
    )
    # The first pair is as it should be, the second is turned round, of the third neither is preferred, and the last
    # has no better image.
    assert preferred(noised).tolist() == [1.0, 0.0, 0.5]
    # The first of three images is not trained, so the second and the third are compared.
    three = replace(
        rows(v[:3], [1.0, 0.0, -1.0], reference=torch.zeros_like(v[:3])), kept=torch.tensor([False, True, True])
    )
    assert preferred(three).tolist() == [0.5]


@pytest.mark.parametrize("method", METHODS[:-1], ids=list(FORWARD)[:-1])
def test_a_good_image_becomes_likelier_and_a_bad_one_less_so(method):
    torch.manual_seed(3)
    v = torch.randn(2, 8, requires_grad=True)
    noised = rows(v, [1.0, -1.0])
    method(noised)[0].sum().backward()
    moved = replace(noised, velocity=v.detach() - 1e-3 * v.grad)
    change = moved.error(moved.velocity) - noised.error(v.detach())
    assert change[0] < 0 < change[1]


@pytest.mark.parametrize("name", ["awm", "flow_dpo"])
def test_gradients_are_those_of_finite_differences(name):
    """Gradients of the two losses without detached factors; the tests above check the other losses by hand."""
    method = METHODS[list(FORWARD).index(name)]
    noised = random_rows()
    v, direction, h = noised.velocity.detach(), torch.randn(4, 2, 3), 1e-2
    loss, _ = method(noised)
    (gradient,) = torch.autograd.grad(loss.sum(), noised.velocity)
    up, down = (method(replace(noised, velocity=v + s * h * direction))[0].sum() for s in (1, -1))
    torch.testing.assert_close((gradient * direction).sum(), (up - down) / (2 * h), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("method", METHODS, ids=list(FORWARD))
def test_groups_do_not_know_of_one_another(method):
    noised = random_rows(count=6)
    whole = method(noised)[0]
    for first in (0, 2, 4):
        part = slice(first, first + 2)
        alone = Noised(*(getattr(noised, n)[part] for n in ("velocity", "old", "reference", "x0", "noise")),
                       noised.sigma, noised.advantage[part], noised.group[part])  # fmt: skip
        torch.testing.assert_close(method(alone)[0], whole[part])


@pytest.mark.parametrize("method", METHODS, ids=list(FORWARD))
def test_only_the_trained_velocity_has_a_gradient(method):
    noised = random_rows()
    others = {name: getattr(noised, name).clone().requires_grad_() for name in ("old", "reference")}
    method(replace(noised, **others))[0].sum().backward()
    assert all(tensor.grad is None for tensor in others.values())


@pytest.mark.parametrize("method", [dgpo, flow_dpo])
def test_methods_that_compare_with_a_reference_ask_for_it(method):
    with pytest.raises(ValueError, match=f"{method.__name__} compares with the reference"):
        method(replace(random_rows(), reference=None))


def test_bad_rows_are_named():
    with pytest.raises(ValueError, match=r"sigma is 0\.0"):
        replace(random_rows(), sigma=0.0)
    with pytest.raises(ValueError, match=r"sigma is 1\.5"):
        replace(random_rows(), sigma=1.5)
    with pytest.raises(ValueError, match=r"noise has shape \(1, 2, 3\), velocity \(4, 2, 3\)"):
        replace(random_rows(), noise=torch.zeros(1, 2, 3))
