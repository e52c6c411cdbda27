"""Moving clip bounds: closed forms, the searched balance against a search by hand, and sums that add up."""

import math
from functools import partial

import pytest
import torch

from flowgrpo.core.bounds import balance_path, balance_sums, balanced_bounds, bapo, dcpo
from flowgrpo.core.objectives import policy_loss
from flowgrpo.core.surrogates import clip

NAN = math.nan


def single(surrogate, ratio, adv, prior=0.5):
    """Value and gradient of one token whose old probability is `prior`."""
    leaf = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    logp = leaf + math.log(prior)
    loss = surrogate(leaf, torch.tensor([adv], dtype=torch.float64), logp, torch.ones(1, 1, dtype=torch.bool))
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.item(), grad.item()


def dcpo_bounds(prior, low=0.16, high=0.2):
    lower = 0.5 + 0.5 * math.sqrt(max(1 - 4 * low / prior, 0))
    return lower, 0.5 + 0.5 * math.sqrt(1 + 4 * high / prior)


@pytest.mark.parametrize("prior", [0.9, 0.7, 0.3, 0.02])
def test_dcpo_binds_exactly_at_its_closed_form(prior):
    lower, upper = dcpo_bounds(prior)
    for ratio, adv, alive, effective in [
        (upper * 0.999, 2.0, True, upper * 0.999),
        (upper * 1.001, 2.0, False, upper),
        (lower * 1.001, -2.0, True, lower * 1.001),
        (lower * 0.999, -2.0, False, lower),
        # Pessimistic: the other side is never bounded.
        (lower * 0.5, 2.0, True, lower * 0.5),
        (min(upper * 1.5, 9.0), -2.0, True, min(upper * 1.5, 9.0)),
    ]:
        value, grad = single(dcpo, ratio, adv, prior)
        assert value == pytest.approx(-adv * effective, rel=1e-9)
        assert grad == pytest.approx(-adv * ratio if alive else 0.0, rel=1e-9)


def test_dcpo_bounds_solve_their_condition():
    """(r - 1) r q is `high` at the upper bound and -`low` at the lower one."""
    lower, upper = dcpo_bounds(0.8)
    assert (upper - 1) * upper * 0.8 == pytest.approx(0.2)
    assert (lower - 1) * lower * 0.8 == pytest.approx(-0.16)
    assert dcpo_bounds(0.6)[0] == 0.5  # 4 low > q: the ratio may fall to a half


def test_dcpo_gives_rare_tokens_room_up_to_the_dual_clip():
    assert single(dcpo, 3.0, 1.0, prior=0.9)[1] == 0
    assert single(dcpo, 3.0, 1.0, prior=0.01)[1] == pytest.approx(-3.0)
    for adv in (1.0, -1.0):
        value, grad = single(dcpo, 11.0, adv, prior=1e-6)
        assert (value, grad) == (pytest.approx(-10.0 * adv), 0.0)
        assert single(dcpo, 9.9, adv, prior=1e-6)[1] == pytest.approx(-9.9 * adv)
    assert single(partial(dcpo, most=4.0), 5.0, -1.0, prior=1e-6) == (pytest.approx(4.0), 0.0)
    assert single(partial(dcpo, most=1.5), 2.0, -1.0, prior=1e-6) == (pytest.approx(1.5), 0.0)
    assert single(dcpo, 1.0, 1.0, prior=math.exp(-300))[1] == pytest.approx(-1.0)  # no overflow in 1 / q


def test_dcpo_bounds_neither_overflow_nor_learn():
    mask = torch.ones(1, 1, dtype=torch.bool)
    rare = dcpo(torch.full((1, 1), math.log(11)), torch.ones(1), torch.full((1, 1), -300.0), mask)  # 1 / q in float32
    assert rare.item() == pytest.approx(-10)
    leaf = torch.tensor([[math.log(3)]], requires_grad=True)
    loss = dcpo(leaf, torch.ones(1), leaf.detach() + math.log(0.9), mask)
    assert torch.autograd.grad(loss.sum(), leaf)[0].item() == 0


def test_dcpo_resolves_small_bounds_in_float32():
    _, upper = dcpo_bounds(0.5, 1e-6, 1e-6)
    log_ratio = torch.tensor([[0.99, 1.01]]) * math.log(upper)
    log_ratio.requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = dcpo(log_ratio, torch.ones(1), log_ratio + math.log(0.5), mask, low=1e-6, high=1e-6)
    assert (torch.autograd.grad(loss.sum(), log_ratio)[0] != 0).tolist() == [[True, False]]


def test_bapo_is_ppos_clip_with_bounds_of_the_ratio():
    g = torch.Generator().manual_seed(0)
    log_ratio = 0.5 * torch.randn(40, 5, generator=g, dtype=torch.float64)
    adv, mask = torch.randn(40, generator=g, dtype=torch.float64), torch.ones(40, 5)
    want = clip(log_ratio, adv, log_ratio, mask, low=0.4, high=0.2)
    torch.testing.assert_close(bapo(log_ratio, adv, log_ratio, mask), want)
    bounds = {"lower": torch.tensor(0.6, dtype=torch.float64), "upper": torch.full((40, 5), 1.2, dtype=torch.float64)}
    torch.testing.assert_close(bapo(log_ratio, adv, log_ratio, mask, **bounds), want)


def test_the_path_raises_the_upper_bound_first_and_ends_at_both_ends():
    path = balance_path(lower=(0.8, 0.9), upper=(1.2, 1.5), lower_step=0.05, upper_step=0.2)
    assert path == [(0.8, 1.2), (0.8, 1.4), (0.8, 1.5), (pytest.approx(0.85), 1.5), (0.9, 1.5)]
    assert balance_path(lower=(0.8, 0.8), upper=(1.2, 1.2)) == [(0.8, 1.2)]
    path = balance_path()
    assert (len(path), path[0], path[36], path[-1]) == (52, (0.6, 1.2), (0.6, 3.0), (0.9, 3.0))
    assert len(balance_path(upper=(1.2, 1.3), upper_step=0.1, lower=(0.6, 0.6))) == 2  # rounding adds no step


# Ratios 1.3 and 1.1 of good tokens (A = 1), 0.85 and 1.0 of bad ones (A = -2).
LOG_RATIO = torch.tensor([[1.3, 1.1], [0.85, 1.0]], dtype=torch.float64).log()
ADV = torch.tensor([1.0, -2.0], dtype=torch.float64)
PATH = [(0.8, 1.2), (0.8, 1.4), (0.9, 1.4)]
SUMS = [[1.1, 1.1 + 3.7], [2.4, 2.4 + 3.7], [2.4, 2.4 + 2.0]]


def test_balance_by_hand():
    sums = balance_sums(LOG_RATIO, ADV, None, PATH)
    torch.testing.assert_close(sums, torch.tensor(SUMS, dtype=torch.float64))
    halved = balance_sums(LOG_RATIO, torch.tensor([0.5, -2.0]), None, PATH)
    torch.testing.assert_close(halved, torch.tensor([[0.55, 4.25], [1.2, 4.9], [1.2, 3.2]], dtype=torch.float64))
    # Shares are 0.229, 0.393 and 0.545.
    for target, want in ((0.2, 0), (0.35, 1), (0.4, 2), (0.54, 2), (0.9, 2)):
        lower, upper = balanced_bounds(sums, PATH, target)
        assert (lower.item(), upper.item()) == PATH[want]


@pytest.mark.parametrize("target", [0.3, 0.35])
def test_the_chosen_bounds_give_the_gradient_the_share_they_promise(target):
    g = torch.Generator().manual_seed(1)
    log_ratio = 0.3 * torch.randn(60, 7, generator=g, dtype=torch.float64)
    adv = torch.cat([torch.ones(20), -torch.ones(40)]).double()
    path = balance_path()
    lower, upper = balanced_bounds(balance_sums(log_ratio, adv, None, path), path, target)

    def share(lower, upper):
        leaf = log_ratio.clone().requires_grad_()
        loss, _ = policy_loss(leaf, torch.zeros_like(leaf), adv, surrogate=partial(bapo, lower=lower, upper=upper))
        grad = torch.autograd.grad(loss, leaf)[0].abs().sum(1)
        return (grad[adv > 0].sum() / grad.sum()).item()

    place = path.index((lower.item(), upper.item()))
    assert 0 < place < len(path) - 1
    assert share(lower, upper) > target > share(*path[place - 1])
    shares = [share(*bounds) for bounds in path]
    assert shares == sorted(shares)


def test_balance_adds_over_micro_batches_and_never_sees_padding():
    mask = torch.tensor([[True, False], [True, True]])
    spoilt = LOG_RATIO.masked_fill(~mask, NAN)
    adv = ADV[:, None].expand(2, 2).masked_fill(~mask, NAN)
    whole = balance_sums(spoilt, adv, mask, PATH)
    parts = sum(balance_sums(spoilt[i : i + 1], adv[i : i + 1], mask[i : i + 1].long(), PATH) for i in (1, 0))
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(whole[:, 0], torch.tensor([0.0, 1.3, 1.3], dtype=torch.float64))


def test_without_bad_tokens_or_any_the_first_bounds_stay():
    for adv in (ADV.abs(), 0 * ADV):
        lower, upper = balanced_bounds(balance_sums(LOG_RATIO, adv, None, PATH), PATH)
        assert (lower.item(), upper.item()) == PATH[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: single(partial(dcpo, low=-0.1), 1.0, 1.0), "low=-0.1"),
        (lambda: single(partial(dcpo, high=-0.1), 1.0, 1.0), "high=-0.1"),
        (lambda: single(partial(dcpo, most=1.0), 1.0, 1.0), "most=1.0"),
        (lambda: single(partial(bapo, lower=0.0), 1.0, 1.0), "`lower` is 0.0"),
        (lambda: single(partial(bapo, lower=1.1), 1.0, 1.0), "`lower` is 1.1"),
        (lambda: single(partial(bapo, upper=0.9), 1.0, 1.0), "`upper` is 0.9"),
        (lambda: balance_path(lower=(0.9, 0.6)), "lower <= 1 <= upper"),
        (lambda: balance_path(upper=(0.9, 1.5)), "lower <= 1 <= upper"),
        (lambda: balance_path(upper_step=0.0), "upper_step=0.0"),
        (lambda: balance_path(upper_step=1e-7), "1.8e.07 pairs of bounds.*at most 1000"),
        (lambda: balance_path(lower_step=-1.0), "lower_step=-1.0"),
        (lambda: balanced_bounds(torch.zeros(3, 2), PATH, 1.0), "`target` is 1.0"),
        (lambda: balanced_bounds(torch.zeros(2, 2), PATH), r"shape \(2, 2\).*3 pairs"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
