"""Surrogates for older samples: hand-computed values and gradients, and what `policy_loss` requires from all."""

import math
from functools import partial

import pytest
import torch

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.objectives import policy_loss
from flowgrpo.core.offpolicy import (
    MORE_SURROGATES,
    asymre,
    implicit_negative,
    nft,
    opmd,
    r2vpo,
    ratio_variance,
    rec,
    regression,
)
from flowgrpo.core.surrogates import dro, reinforce

NAN, INF = math.nan, math.inf
B, T = 6, 5
NAMES = sorted(MORE_SURROGATES)
ON_POLICY = [name for name in NAMES if name != "asymre"]


def batch(seed=0, spread=0.4):
    g = torch.Generator().manual_seed(seed)
    logp = -1 - torch.rand(B, T, generator=g, dtype=torch.float64)
    old = logp + spread * torch.randn(B, T, generator=g, dtype=torch.float64)
    adv = torch.randn(B, generator=g, dtype=torch.float64)
    return logp, old, adv, torch.arange(T) < torch.tensor([5, 3, 1, 4, 0, 2])[:, None]


def run(logp, *args, **options):
    leaf = logp.clone().requires_grad_()
    loss, metrics = policy_loss(leaf, *args, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


def evaluate(surrogate, log_ratio, adv):
    """Value and gradient of single entries; the log-prob is the log-ratio plus an old log-prob of -1.5."""
    leaf = torch.tensor(log_ratio, dtype=torch.float64)[:, None].requires_grad_()
    loss = surrogate(leaf, torch.tensor(adv, dtype=torch.float64), leaf - 1.5, torch.ones_like(leaf).bool())
    return loss.detach()[:, 0], torch.autograd.grad(loss.sum(), leaf)[0][:, 0]


def close(got, want, tol=1e-10):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), atol=tol, rtol=tol)


RATIOS = torch.tensor([0.5, 0.9, 1.1, 1.5], dtype=torch.float64)
LOG = RATIOS.log().tolist()


def test_r2vpo_by_hand():
    for adv in (2.0, -2.0):
        value, grad = evaluate(partial(r2vpo, lam=3.0), LOG, [adv] * 4)
        close(value, -adv * RATIOS + 3 * (RATIOS - 1) ** 2)
        close(grad, (-adv + 6 * (RATIOS - 1)) * RATIOS)
    close(evaluate(r2vpo, LOG, [2.0] * 4)[0], -2 * RATIOS + (RATIOS - 1) ** 2)
    close(evaluate(partial(r2vpo, lam=0.0), LOG, [2.0] * 4)[0], -2 * RATIOS)
    assert evaluate(r2vpo, [800.0], [1.0])[0].isfinite().all()


def test_the_measured_variance_is_what_is_penalised():
    log_ratio = torch.tensor([[math.log(1.5), math.log(0.5)], [math.log(2.0), NAN]], requires_grad=True)
    pair = ratio_variance(log_ratio, ~log_ratio.isnan())
    close(pair, [0.25 + 0.25 + 1.0, 3.0], 1e-6)
    assert not pair.requires_grad


def test_opmd_pulls_the_whole_row():
    leaf = torch.tensor([[0.3, -0.1, 9.0], [0.2, 0.2, 0.2]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True] * 3])
    adv = torch.tensor([2.0, -1.0], dtype=torch.float64)
    loss = opmd(leaf, adv, leaf - 1.5, mask, tau=0.4)
    rows = torch.stack([loss[i][mask[i]].sum() for i in range(2)])
    logp = (leaf - 1.5).detach()
    close(rows.detach(), [-2 * logp[0, :2].sum() + 0.2 * 0.2**2, logp[1].sum() + 0.2 * 0.6**2])
    (grad,) = torch.autograd.grad(rows.sum(), leaf)
    close(grad[mask], [-2 + 0.4 * 0.2] * 2 + [1 + 0.4 * 0.6] * 3)
    loss = opmd(leaf, adv, leaf - 1.5, mask, tau=0.4)
    close(torch.autograd.grad(loss[1, 0], leaf)[0], [[0, 0, 0], [1 + 0.4 * 0.6, 0, 0]])


def test_opmd_of_one_column_is_dro():
    for got, want in zip(
        evaluate(partial(opmd, tau=0.3), LOG, [2.0] * 4), evaluate(partial(dro, beta=0.3), LOG, [2.0] * 4)
    ):
        close(got, want)


def test_asymre_adds_to_every_advantage():
    value, grad = evaluate(partial(asymre, shift=0.3), LOG[:3], [2.0, -2.0, 0.0])
    close(grad, [-2.3, 1.7, -0.3])
    close(value, grad * (torch.tensor(LOG[:3], dtype=torch.float64) - 1.5))
    plain = evaluate(partial(asymre, shift=0.0), LOG, [2.0] * 4)
    close(plain[0], evaluate(reinforce, LOG, [2.0] * 4)[0])


def test_rec_stops_on_one_side_only():
    logp = torch.tensor(LOG, dtype=torch.float64) - 1.5
    surrogate = partial(rec, low=0.2, high=0.3)
    value, grad = evaluate(surrogate, LOG, [2.0] * 4)
    close(grad, [-2.0, -2.0, -2.0, 0.0])
    close(value, -2 * logp * torch.tensor([1, 1, 1, 0]))
    value, grad = evaluate(surrogate, LOG, [-2.0] * 4)
    close(grad, [0.0, 2.0, 2.0, 2.0])
    close(evaluate(surrogate, [math.log(1.25), math.log(0.75)], [1.0, -1.0])[1], [-1.0, 0.0])


def test_rec_goes_by_the_sign_of_a_small_advantage_too_and_its_bounds_are_a_fifth():
    close(evaluate(rec, LOG, [0.5] * 4)[1], [-0.5, -0.5, -0.5, 0])
    ratios = [math.log(r) for r in (1.19, 1.21, 0.81, 0.79)]
    close(evaluate(rec, ratios, [1.0, 1.0, -1.0, -1.0])[1], [-1, 0, 1, 0])


def test_defaults_by_hand():
    x = torch.tensor(LOG, dtype=torch.float64)
    close(evaluate(opmd, LOG, [2.0] * 4)[0], -2 * (x - 1.5) + 0.05 * x**2)
    close(evaluate(asymre, LOG, [2.0] * 4)[1], [-2.1] * 4)
    close(evaluate(regression, LOG, [2.0] * 4)[0], (2 - x) ** 2 / 2)


def test_regression_by_hand():
    x = torch.tensor(LOG, dtype=torch.float64)
    for adv in (2.0, -2.0):
        value, grad = evaluate(partial(regression, beta=0.5), LOG, [adv] * 4)
        close(value, (adv - 0.5 * x) ** 2 / (2 * 0.5))
        close(grad, -(adv - 0.5 * x))
    close(evaluate(partial(regression, beta=4.0), [0.5], [2.0])[1], [0.0])  # the advantage is predicted


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("floor", [1.0, 0.1])
def test_nft_is_the_papers_loss_on_group_scaled_advantages(rate, floor):
    """-w [c log r + (1 - c) log max_v((1 - q r) / (1 - q), floor)], w = sqrt((1 - q) / q)."""
    good = round(8 * rate)
    rewards = torch.tensor([1.0] * good + [0.0] * (8 - good), dtype=torch.float64)
    adv = group_advantages(rewards, [0] * 8, eps=0.0, ddof=0)
    ratio = torch.tensor([0.8, 1.2, 1.0, 0.5, 1.3, 0.7, 1.1, 0.9], dtype=torch.float64)
    value, grad = evaluate(partial(nft, floor=floor), ratio.log().tolist(), adv.tolist())
    w, share = math.sqrt((1 - rate) / rate), (1 - rate * ratio) / (1 - rate)
    bounded = share.clamp(min=floor)
    close(value, torch.where(rewards > 0, -w * ratio.log(), -w * bounded.log()))
    # The bound limits the value. The gradient still passes, divided by the bounded share.
    close(
        grad, torch.where(rewards > 0, torch.tensor(-w, dtype=torch.float64), w * rate / (1 - rate) * ratio / bounded)
    )


def test_nft_keeps_its_precision_far_from_the_old_policy():
    value, grad = evaluate(nft, [30.0, -30.0], [-2.0, -2.0])
    close(value[0], 0.0)
    close(value[1], -math.log(5) / 2)
    assert grad.isfinite().all()
    leaf = torch.tensor([[25.0]], requires_grad=True)
    assert nft(leaf, torch.tensor([-1.0]), leaf, torch.ones(1, 1)).item() == 0.0  # float32


def test_the_negative_policy_and_the_positive_one_average_to_the_old():
    rate, log_ratio = 0.3, torch.tensor([-0.4, 0.1, 0.6], dtype=torch.float64)
    negative = implicit_negative(log_ratio, torch.tensor(rate / (1 - rate)), 1e-6).exp()
    close(rate * log_ratio.exp() + (1 - rate) * negative, [1.0] * 3, 1e-7)


CONFIGS = [
    (name, level, reduce)
    for name in NAMES
    for level in ("token", "sequence")
    for reduce in ("token", "sequence", "sum")
]


@pytest.mark.parametrize(("name", "level", "reduce"), CONFIGS)
def test_in_policy_loss_padding_is_not_seen_and_micro_batches_add(name, level, reduce):
    logp, old, adv, mask = batch()
    options = {"surrogate": MORE_SURROGATES[name], "level": level, "reduce": reduce}
    loss, grad, metrics = run(logp, old, adv, mask, **options)
    assert loss.isfinite()
    assert grad.abs().sum() > 0
    for poison in (NAN, INF):
        wide = adv[:, None].expand(B, T)
        spoilt = run(*(t.masked_fill(~mask, poison) for t in (logp, old, wide)), mask, **options)
        close(spoilt[0], loss, 0)
        close(spoilt[1], grad, 0)
    denom = {"token": mask.sum(), "sequence": mask.any(1).sum(), "sum": B}[reduce]
    order = torch.tensor([3, 0, 5, 2, 4, 1])
    total, gathered = 0.0, torch.zeros_like(grad)
    pairs = dict.fromkeys(metrics, 0.0)
    for rows in (order[:1], order[1:4], order[4:]):
        part = run(logp[rows], old[rows], adv[rows], mask[rows], denom=denom, **options)
        total, gathered[rows] = total + part[0], part[1]
        pairs = {key: pairs[key] + part[2][key] for key in pairs}
    close(total, loss, 1e-9)
    close(gathered, grad, 1e-9)
    for key, pair in metrics.items():
        close(pairs[key], pair, 1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-INF, INF, NAN, -500.0])
def test_a_rejected_entry_may_hold_anything(name, value):
    logp, old, adv, mask = batch()
    weight = torch.ones(B, T)
    logp[0, 1], weight[0, 1] = value, 0.0
    loss, grad, metrics = run(logp, old, adv, mask, surrogate=MORE_SURROGATES[name], weight=weight)
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert grad[0, 1] == 0
    assert all(pair.isfinite().all() for pair in metrics.values())


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_the_gradient_is_reinforce(name):
    logp, _, adv, mask = batch()
    adv[2] = 0.0
    for level in ("token", "sequence"):
        _, grad, _ = run(logp, None, adv, mask, surrogate=MORE_SURROGATES[name], level=level)
        close(grad, run(logp, None, adv, mask, surrogate=reinforce)[1], 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_finite_differences(name):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(4, 3, 6, generator=g, dtype=torch.float64)
    token = torch.randint(0, 5, (4, 3), generator=g)
    theta = 0.3 * torch.randn(6, 5, generator=g, dtype=torch.float64)

    def scored(weights):
        return torch.log_softmax(x @ weights, -1).gather(-1, token[..., None]).squeeze(-1)

    old = scored(theta + 0.05 * torch.randn(6, 5, generator=g, dtype=torch.float64)) + 0.1
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    adv = torch.tensor([1.0, -1.0, 0.5, 0.7], dtype=torch.float64)
    surrogate = partial(nft, floor=0.01) if name == "nft" else MORE_SURROGATES[name]
    reduce = "sequence" if name == "dhpo" else "sum"

    def objective(weights):
        return policy_loss(scored(weights), old, adv, mask, surrogate=surrogate, reduce=reduce)[0]

    assert torch.autograd.gradcheck(objective, theta.clone().requires_grad_(), atol=1e-6)


def test_the_table_is_complete():
    assert NAMES == ["asymre", "bapo", "dcpo", "dhpo", "nft", "opmd", "r2vpo", "rec", "regression"]
    assert all(function.__name__ == name for name, function in MORE_SURROGATES.items())


@pytest.mark.parametrize(
    ("surrogate", "words"),
    [
        (partial(r2vpo, lam=-1.0), "`lam` is -1.0"),
        (partial(opmd, tau=-1.0), "`tau` is -1.0"),
        (partial(rec, low=-0.5), "low=-0.5"),
        (partial(regression, beta=0.0), "`beta` is 0.0"),
        (partial(nft, floor=0.0), "`floor` is 0.0"),
    ],
)
def test_impossible_hyper_parameters_are_refused(surrogate, words):
    with pytest.raises(ValueError, match=words):
        evaluate(surrogate, [0.0], [1.0])
