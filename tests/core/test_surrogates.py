"""Every surrogate's value and gradient, by hand and at its bounds."""

import math
from functools import partial

import pytest
import torch

from flowgrpo.core.surrogates import SURROGATES, cispo, clip, dro, gmpo, pooled_per_column, reinforce, sapo, vespo

INF = float("inf")


def evaluate(surrogate, log_ratio, adv):
    """Value and gradient of single entries; the log-prob is the log-ratio plus an old log-prob of -1.5."""
    leaf = torch.tensor(log_ratio, dtype=torch.float64)[:, None].requires_grad_()
    adv = torch.tensor(adv, dtype=torch.float64)
    loss = surrogate(leaf, adv, leaf - 1.5, torch.ones_like(leaf, dtype=torch.bool))
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach()[:, 0], grad[:, 0]


def close(got, want, tol=1e-10):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), atol=tol, rtol=tol)


LOG = [math.log(r) for r in (0.5, 0.9, 1.1, 1.5)]
CLIP_CASES = [
    # options, sign of A, effective ratio at r = .5, .9, 1.1, 1.5, and which entries keep a gradient
    ({}, 1, [0.5, 0.9, 1.1, 1.2], [1, 1, 1, 0]),
    ({}, -1, [0.8, 0.9, 1.1, 1.5], [0, 1, 1, 1]),
    ({"high": 0.6}, 1, [0.5, 0.9, 1.1, 1.5], [1, 1, 1, 1]),
    ({"dual": 1.3}, -1, [0.8, 0.9, 1.1, 1.3], [0, 1, 1, 0]),
    ({"dual": 1.3}, 1, [0.5, 0.9, 1.1, 1.2], [1, 1, 1, 0]),
    ({"high": INF, "dual": 1.3}, 1, [0.5, 0.9, 1.1, 1.5], [1, 1, 1, 1]),
    ({"low": INF, "high": INF}, 1, [0.5, 0.9, 1.1, 1.5], [1, 1, 1, 1]),
    ({"low": INF, "high": INF}, -1, [0.5, 0.9, 1.1, 1.5], [1, 1, 1, 1]),
]


@pytest.mark.parametrize(("options", "sign", "effective", "alive"), CLIP_CASES)
def test_clip_by_hand(options, sign, effective, alive):
    value, grad = evaluate(partial(clip, **options), LOG, [2.0 * sign] * 4)
    effective = torch.tensor(effective, dtype=torch.float64)
    close(value, -2 * sign * effective)
    close(grad, -2 * sign * effective * torch.tensor(alive))


def test_the_dual_clip_leaves_small_advantages_above_zero_alone():
    close(evaluate(partial(clip, high=INF, dual=1.3), LOG, [0.5] * 4)[1], [-0.25, -0.45, -0.55, -0.75])


def test_clip_is_the_textbook_minimum():
    generator = torch.Generator().manual_seed(0)
    log_ratio, adv = 0.6 * torch.randn(400, generator=generator), torch.randn(400, generator=generator)
    ratio = log_ratio.double().exp()
    for low, high in ((0.2, 0.3), (0.0, 0.1), (1.5, 0.2)):
        want = -torch.minimum(adv * ratio, adv * ratio.clamp(1 - low, 1 + high))
        got, _ = evaluate(partial(clip, low=low, high=high), log_ratio.tolist(), adv.tolist())
        close(got, want, 1e-6)


def test_clip_resolves_published_bounds_in_float32():
    limit = 2e-6
    log_ratio = torch.tensor([[0.99e-6, 1.99e-6, 2.01e-6, -1.99e-6, -2.01e-6]], requires_grad=True)
    mask = torch.ones(1, 5, dtype=torch.bool)
    for adv, alive in ((1.0, [1, 1, 0, 1, 1]), (-1.0, [1, 1, 1, 1, 0])):
        loss = clip(log_ratio, torch.tensor([adv]), log_ratio, mask, low=limit, high=limit)
        (grad,) = torch.autograd.grad(loss.sum(), log_ratio)
        assert (grad != 0).tolist() == [[bool(a) for a in alive]]


def test_clip_keeps_the_full_gradient_exactly_at_the_bound():
    value, grad = evaluate(partial(clip, low=0.5, high=1.0), [math.log1p(1.0), math.log1p(-0.5)], [1.0, -1.0])
    close(grad, [-2.0, 0.5])
    close(value, [-2.0, 0.5])


def test_cispo_truncates_the_weight_and_never_the_gradient():
    value, grad = evaluate(partial(cispo, high=1.3), LOG, [2.0, -2.0, 2.0, 2.0])
    weight = torch.tensor([0.5, 0.9, 1.1, 1.3], dtype=torch.float64)
    adv = torch.tensor([2.0, -2.0, 2.0, 2.0], dtype=torch.float64)
    close(grad, -weight * adv)
    close(value, -weight * adv * (torch.tensor(LOG, dtype=torch.float64) - 1.5))
    _, grad = evaluate(partial(cispo, low=0.2, high=1.2), LOG, [1.0] * 4)
    close(grad, [-0.8, -0.9, -1.1, -1.2])
    close(evaluate(cispo, [math.log(8.0)], [1.0])[1], [-5.0])
    close(evaluate(partial(cispo, high=0.5), [0.0], [1.0])[1], [-0.5])


def test_sapo_by_hand():
    for adv, tau in ((3.0, 1.0), (-3.0, 1.05)):
        value, grad = evaluate(sapo, LOG, [adv] * 4)
        ratio = torch.tensor(LOG, dtype=torch.float64).exp()
        gate = torch.sigmoid(tau * (ratio - 1))
        close(value, -adv * gate * 4 / tau)
        close(grad, -adv * 4 * gate * (1 - gate) * ratio)
    assert evaluate(sapo, [800.0], [-1.0])[1].isfinite().all()  # no inf * 0 far outside the gate
    value, grad = evaluate(partial(sapo, tau_pos=0.5, tau_neg=0.25), [math.log(3.0)] * 2, [0.5, -0.5])
    gates = [1 / (1 + math.exp(-tau * 2)) for tau in (0.5, 0.25)]
    close(value, [-0.5 * gates[0] * 8, 0.5 * gates[1] * 16])
    close(grad, [-0.5 * 4 * gates[0] * (1 - gates[0]) * 3, 0.5 * 4 * gates[1] * (1 - gates[1]) * 3])


def test_vespo_by_hand():
    log_ratio = torch.tensor([[0.1, -0.4, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    w = math.exp(-0.3)
    for adv, k, lam in ((2.0, 2.0, 3.0), (0.5, 2.0, 3.0), (-2.0, 3.0, 2.0)):
        logp = torch.tensor([[-1.0, -2.0, 0.0]], dtype=torch.float64, requires_grad=True)
        loss = vespo(log_ratio, torch.tensor([adv]), logp, mask)
        phi = w**k * math.exp(lam * (1 - w))
        close(loss.detach()[mask], [phi * adv, 2 * phi * adv], 1e-9)
        (grad,) = torch.autograd.grad(loss[mask].sum(), logp)
        close(grad[mask], [-phi * adv] * 2, 1e-9)
    # A column counts for 20 at most: -20 and 5 in the place of -30 and 5.
    far = vespo(torch.tensor([[-30.0, 5.0]]).double(), torch.ones(1), -torch.ones(1, 2).double(), torch.ones(1, 2))
    phi = math.exp(-2 * 15 - 3 * math.expm1(-15))
    torch.testing.assert_close(far, torch.full((1, 2), phi, dtype=torch.float64), atol=0, rtol=1e-9)
    # A row is at least 1e-8 times as likely as it was.
    far = vespo(torch.full((1, 2), -15.0).double(), torch.ones(1), -torch.ones(1, 2).double(), torch.ones(1, 2))
    phi = 1e-16 * math.exp(3 * (1 - 1e-8))
    torch.testing.assert_close(far, torch.full((1, 2), phi, dtype=torch.float64), atol=0, rtol=1e-9)
    for extreme in (80.0, -80.0):
        far = torch.full((1, 3), extreme)
        assert vespo(far, torch.tensor([1.0]), -far, mask).isfinite().all()


def test_dro_and_reinforce_by_hand():
    x = torch.tensor(LOG, dtype=torch.float64)
    value, grad = evaluate(partial(dro, beta=0.3), LOG, [2.0] * 4)
    close(value, -2 * (x - 1.5) + 0.15 * x**2)
    close(grad, -2 + 0.3 * x)
    close(evaluate(dro, LOG, [2.0] * 4)[0], -2 * (x - 1.5) + 0.025 * x**2)
    value, grad = evaluate(reinforce, LOG, [2.0] * 4)
    close(value, -2 * (x - 1.5))
    close(grad, [-2.0] * 4)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    log_ratio = torch.tensor([[0.1, 0.7, -0.9, 5.0], [0.1, 0.7, -0.9, 0.2]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True] * 4])
    adv = torch.tensor([2.0, -3.0], dtype=torch.float64)
    leaf = log_ratio.clone().requires_grad_()
    loss = gmpo(leaf, adv, leaf, mask)
    rows = [(loss[i][mask[i]]).mean() for i in range(2)]
    # A > 0 is bounded above only, A < 0 below only.
    pooled = [
        -2.0 * torch.exp(torch.stack([leaf[0, 0], torch.tensor(0.4), leaf[0, 2]]).mean()),
        3.0 * torch.exp(torch.stack([leaf[1, 0], leaf[1, 1], torch.tensor(-0.4), leaf[1, 3]]).mean()),
    ]
    for got, want in zip(rows, pooled):
        close(got, want.item(), 1e-7)
        close(*(torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (got, want)), 1e-7)


def test_pooled_per_column_has_the_row_mean_and_unit_gradients():
    x = torch.tensor([[1.0, 3.0, 100.0], [4.0, 5.0, 6.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    got = pooled_per_column(x, mask)
    assert got[0, :2].tolist() == [2.0, 2.0]
    assert got[1].tolist() == [0.0, 0.0, 0.0]
    (grad,) = torch.autograd.grad(got[0, 0], x)
    assert grad.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert pooled_per_column(torch.tensor([[4.0, 9.0]]), torch.tensor([[1, 0]]))[0, 0] == 4


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_every_surrogate_has_the_policy_gradient_on_policy(name):
    adv = [2.0, -0.7, 0.0]
    value, grad = evaluate(SURROGATES[name], [0.0, 0.0, 0.0], adv)
    close(grad, [-a for a in adv], 1e-12)
    assert value.shape == (3,)


def test_the_table_of_surrogates_is_complete():
    assert sorted(SURROGATES) == ["cispo", "clip", "dro", "gmpo", "reinforce", "sapo", "vespo"]
    assert all(SURROGATES[f.__name__] is f for f in (cispo, clip, dro, gmpo, reinforce, sapo, vespo))


@pytest.mark.parametrize(
    ("surrogate", "options"),
    [
        (clip, {"low": -0.1}),
        (clip, {"dual": 0.9}),
        (cispo, {"high": 0.0}),
        (gmpo, {"high": -1.0}),
        (sapo, {"tau_neg": 0.0}),
    ],
)
def test_impossible_hyper_parameters_are_refused(surrogate, options):
    with pytest.raises(ValueError, match=f"{next(iter(options.values()))}"):
        evaluate(partial(surrogate, **options), [0.0], [1.0])
