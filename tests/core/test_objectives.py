"""The loss: its reductions and penalties by hand, and gradients that add over batches."""

import math
from functools import partial

import pytest
import torch

from flowgrpo.core.objectives import SURROGATES, clip, gaussian_kl, gmpo, kl, policy_loss, reinforce

NAN, INF = float("nan"), float("inf")
B, T = 6, 5


def batch(seed=0, spread=0.4):
    """Ragged [B, T] log-probs (float64), with row 4 fully masked."""
    g = torch.Generator().manual_seed(seed)
    logp = -1 - torch.rand(B, T, generator=g, dtype=torch.float64)
    old = logp + spread * torch.randn(B, T, generator=g, dtype=torch.float64)
    adv = torch.randn(B, generator=g, dtype=torch.float64)
    lengths = torch.tensor([5, 3, 1, 4, 0, 2])
    return logp, old, adv, torch.arange(T) < lengths[:, None]


def run(logp, *args, **options):
    leaf = logp.clone().requires_grad_()
    loss, metrics = policy_loss(leaf, *args, **options)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad, metrics


def close(got, want, tol=1e-9):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), atol=tol, rtol=tol)


CONFIGS = [
    {"surrogate": SURROGATES[name], "level": level, "reduce": reduce}
    for name in sorted(SURROGATES)
    for level in ("token", "sequence")
    for reduce in ("token", "sequence", "sum")
]


def test_reductions_by_hand():
    logp = torch.tensor([[-1.0, -2.0, -4.0], [-3.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = ~logp.isnan()
    adv = torch.tensor([1.0, 2.0, 3.0])
    for reduce, denom, want in [
        ("token", None, 13 / 4),
        ("sequence", None, (7 / 3 + 6) / 2),
        ("sum", None, 13 / 3),
        ("token", 8, 13 / 8),
        ("sequence", torch.tensor(5.0), (7 / 3 + 6) / 5),
        ("sum", 30.0, 13 / 30),
        ("sum", 0.5, 26),
    ]:
        loss, _, _ = run(logp, None, adv, mask, surrogate=reinforce, reduce=reduce, denom=denom)
        close(loss, want, 1e-6)


@pytest.mark.parametrize("reduce", ["token", "sequence", "sum"])
def test_one_token_is_its_own_mean_and_none_costs_nothing(reduce):
    logp, adv = torch.tensor([[-3.0]]), torch.tensor([2.0])
    for mask, want in (([[1]], 6.0), ([[0]], 0.0)):
        loss, _, _ = run(logp, None, adv, torch.tensor(mask), surrogate=reinforce, reduce=reduce)
        close(loss, want, 1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", CONFIGS)
def test_padding_never_reaches_value_or_gradient(options, weighted):
    logp, old, adv, mask = batch()
    extra = torch.rand(B, T, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def spoil(values, poison):
        return values.masked_fill(~mask, poison)

    def evaluate(poison):
        weight = spoil(extra, poison) if weighted else None
        per_column = spoil(adv[:, None].expand(B, T), poison)
        penalty = spoil(0.1 * extra, poison)
        return run(
            spoil(logp, poison),
            spoil(old, poison),
            per_column,
            mask,
            weight=weight,
            penalty=penalty,
            **options,
        )

    loss, grad, metrics = evaluate(0.0)
    assert loss.isfinite()
    for poison in (NAN, INF, -INF):
        again = evaluate(poison)
        close(again[0], loss, 0)
        close(again[1], grad, 0)
        assert (again[1][~mask] == 0).all()
        for name in metrics:
            close(again[2][name], metrics[name], 0)


@pytest.mark.parametrize("options", CONFIGS)
def test_micro_batches_with_the_step_count_add_up_to_the_whole(options):
    logp, old, adv, mask = batch()
    denom = {"token": mask.sum(), "sequence": mask.any(1).sum(), "sum": torch.tensor(B)}[options["reduce"]]
    whole = run(logp, old, adv, mask, **options)
    order = torch.tensor([3, 0, 5, 2, 4, 1])
    parts = [
        (rows, run(logp[rows], old[rows], adv[rows], mask[rows], denom=denom, **options))
        for rows in (order[:1], order[1:4], order[4:])
    ]
    close(sum(p[0] for _, p in parts), whole[0])
    grad = torch.zeros_like(logp)
    for rows, part in parts:
        grad[rows] = part[1]
    close(grad, whole[1])
    for name, pair in whole[2].items():
        close(sum(p[2][name] for _, p in parts), pair)


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_on_policy_gradient_is_reinforce(name):
    logp, _, adv, mask = batch()
    for level in ("token", "sequence"):
        _, grad, metrics = run(logp, None, adv, mask, surrogate=SURROGATES[name], level=level)
        _, want, _ = run(logp, None, adv, mask, surrogate=reinforce)
        close(grad, want, 1e-12)
        total, count = metrics["ratio"]
        assert total == count == mask.sum()
        assert metrics["clip_share"][0] == 0


def test_old_log_probs_equal_to_the_new_ones_mean_on_policy():
    logp, _, adv, mask = batch()
    for got, want in zip(run(logp, logp.clone(), adv, mask)[:2], run(logp, None, adv, mask)[:2]):
        close(got, want, 0)


def test_inside_the_region_the_clip_does_nothing():
    logp, old, adv, mask = batch(spread=0.05)
    free = run(logp, old, adv, mask, surrogate=partial(clip, low=INF, high=INF))
    clipped = run(logp, old, adv, mask, surrogate=partial(clip, low=0.5, high=0.5))
    close(clipped[0], free[0], 0)
    close(clipped[1], free[1], 0)
    assert clipped[2]["clip_share"][0] == 0
    ratio = (logp - old).exp()
    close(free[1], torch.where(mask, -adv[:, None] * ratio / mask.sum(), 0.0))


@pytest.mark.parametrize("low_high", [(0.2, 0.2), (0.02, 0.04)])
def test_sequence_level_has_value_and_gradient_of_the_pooled_ratio(low_high):
    logp, old, adv, mask = batch()
    low, high = low_high
    loss, grad, _ = run(
        logp, old, adv, mask, surrogate=partial(clip, low=low, high=high), level="sequence", reduce="sequence"
    )
    leaf = logp.clone().requires_grad_()
    rows = mask.any(1)
    pooled = torch.where(mask, leaf - old, 0.0).sum(1)[rows] / mask.sum(1)[rows]
    ratio = pooled.exp()
    want = -torch.minimum(adv[rows] * ratio, adv[rows] * ratio.clamp(1 - low, 1 + high)).mean()
    close(loss, want.detach())
    close(grad, torch.autograd.grad(want, leaf)[0])


def test_sequence_level_backpropagates_one_column_at_a_time():
    logp, old, adv, mask = batch()
    options = {"level": "sequence", "reduce": "sequence", "surrogate": partial(clip, low=0.05, high=0.05)}
    _, whole, _ = run(logp, old, adv, mask, **options)
    for t in range(T):
        column = logp[:, t].clone().requires_grad_()
        mixed = torch.stack([column if u == t else logp[:, u] for u in range(T)], 1)
        loss, _ = policy_loss(mixed, old, adv, mask, **options)
        close(torch.autograd.grad(loss, column)[0], whole[:, t])


def test_gmpo_reduces_to_its_pooled_form():
    logp, old, adv, mask = batch()
    loss, grad, _ = run(logp, old, adv, mask, surrogate=gmpo, reduce="sequence")
    leaf = logp.clone().requires_grad_()
    lr = leaf - old
    bounded = torch.where(adv[:, None] > 0, lr.clamp(max=0.4), lr.clamp(min=-0.4))
    rows = mask.any(1)
    pooled = torch.where(mask, bounded, 0.0).sum(1)[rows] / mask.sum(1)[rows]
    want = (-adv[rows] * pooled.exp()).mean()
    close(loss, want.detach())
    close(grad, torch.autograd.grad(want, leaf)[0])


def test_weight_scales_the_surrogate_and_not_the_penalty():
    logp, old, adv, mask = batch()
    weight = torch.rand(B, T, dtype=torch.float64, generator=torch.Generator().manual_seed(8)).requires_grad_()
    leaf = logp.clone().requires_grad_()
    penalty = 0.3 * kl(leaf, old, "k2")
    loss, metrics = policy_loss(leaf, old, adv, mask, weight=weight, penalty=penalty)
    plain = clip(leaf - old, adv, leaf, mask)
    want = torch.where(mask, plain * weight.detach() + penalty, 0.0).sum() / mask.sum()
    close(loss.detach(), want.detach())
    grad, to_weight = torch.autograd.grad(loss, (leaf, weight), retain_graph=True, allow_unused=True)
    close(grad, torch.autograd.grad(want, leaf)[0])
    assert to_weight is None
    close(metrics["penalty"][0], penalty.detach()[mask].sum())
    close(metrics["weight"][0], weight.detach()[mask].sum())
    per_row = run(logp, old, adv, mask, weight=torch.arange(float(B)))
    per_entry = run(logp, old, adv, mask, weight=torch.arange(float(B))[:, None].expand(B, T))
    close(per_row[1], per_entry[1], 0)


@pytest.mark.parametrize("name", sorted(SURROGATES))
@pytest.mark.parametrize("value", [-INF, INF, NAN, -500.0])
@pytest.mark.parametrize("side", ["old", "new", "both"])
def test_a_rejected_entry_may_hold_anything(name, value, side):
    logp, old, adv, mask = batch()
    if side != "new":
        old[0, 1] = value
    if side != "old":
        logp[0, 1] = value
    weight = torch.ones(B, T)
    weight[0, 1] = 0
    loss, grad, metrics = run(logp, old, adv, mask, surrogate=SURROGATES[name], weight=weight)
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert grad[0, 1] == 0
    assert all(pair.isfinite().all() for pair in metrics.values())


@pytest.mark.parametrize(("value", "counted"), [(-500.0, -20), (500.0, 20), (NAN, 0), (INF, 0), (-INF, 0)])
def test_a_rejected_entry_enters_the_rows_ratio_within_limits(value, counted):
    """The row's other log-ratio is 0, so the row's mean is half of the rejected entry's value."""
    logp = torch.tensor([[value, -1.0]], dtype=torch.float64)
    options = {"surrogate": partial(clip, low=INF, high=INF), "level": "sequence", "reduce": "sum"}
    loss, grad, _ = run(logp, torch.full_like(logp, -1.0), torch.ones(1), weight=torch.tensor([[0.0, 1.0]]), **options)
    close(loss, -math.exp(counted / 2))
    close(grad, [[0.0, -math.exp(counted / 2)]])


def test_the_gradient_scale_is_that_of_both_ways_to_the_policy():
    """DRO at A = 2, beta 0.3 and a log-ratio of 1: |-2 + 0.3| / 2."""
    logp = torch.zeros(1, 1)
    _, metrics = policy_loss(logp, logp - 1, torch.tensor([2.0]), surrogate=partial(SURROGATES["dro"], beta=0.3))
    close(metrics["gradient_scale"], [0.85, 1], 1e-6)


def test_guard_is_a_log_ratio_with_a_step_weight():
    g = torch.Generator().manual_seed(4)
    noise, drift = torch.randn(2, 3, 64, generator=g), 1e-5 * torch.randn(2, 3, 64, generator=g)
    delta = torch.tensor([[0.05, 0.1, 0.2]])
    adv = torch.tensor([1.0, -1.0])
    log_ratio = (noise * drift).mean(-1)
    surrogate = partial(clip, low=2e-6, high=2e-6)
    loss, _, _ = run(log_ratio, torch.zeros_like(log_ratio), adv, weight=1 / delta, surrogate=surrogate)
    ratio = log_ratio.double().exp()
    wide = adv[:, None].double()
    want = -torch.minimum(wide * ratio, wide * ratio.clamp(1 - 2e-6, 1 + 2e-6)) / delta
    close(loss, want.mean(), 1e-6)


def test_metrics_by_hand():
    log_ratio = torch.tensor([[0.5, 0.1, -0.5], [0.5, -0.1, -0.5], [0.5, 0.0, NAN]])
    adv, mask = torch.tensor([1.0, -2.0, 0.0]), ~log_ratio.isnan()
    _, metrics = policy_loss(log_ratio, torch.zeros(3, 3), adv, mask)
    values = log_ratio[mask]
    share = {name: metrics[name].tolist() for name in ("clip_share", "clip_share_pos", "clip_share_neg")}
    assert share == {"clip_share": [2, 8], "clip_share_pos": [1, 3], "clip_share_neg": [1, 3]}
    for name, want in [
        ("ratio", values.exp()),
        ("log_ratio", values),
        ("log_ratio_sq", values**2),
        ("approx_kl", values.exp() - 1 - values),
    ]:
        close(metrics[name], [want.sum().item(), 8], 1e-5)
    kept = math.exp(0.1) + math.exp(-0.5) + math.exp(0.5) + math.exp(-0.1)
    close(metrics["gradient_scale"], [kept, 6], 1e-5)
    effective = (
        torch.tensor([1.2, math.exp(0.1), math.exp(-0.5)]),
        torch.tensor([math.exp(0.5), math.exp(-0.1), 0.8]),
    )
    close(metrics["loss"], [(-effective[0].sum() + 2 * effective[1].sum()).item(), 8], 1e-5)
    assert not any(pair.requires_grad for pair in metrics.values())


def test_clip_share_sees_the_clip_of_any_surrogate_and_level():
    logp = torch.tensor([[0.3, 0.9], [-0.3, -0.9]])
    old, adv = torch.zeros(2, 2), torch.tensor([1.0, -1.0])

    def share(**options):
        with torch.no_grad():  # evaluation must report the same numbers
            return policy_loss(logp, old, adv, **options)[1]["clip_share"].tolist()

    assert share(surrogate=gmpo) == [2, 4]
    assert share(level="sequence", surrogate=partial(clip, low=0.5, high=1.0)) == [0, 4]
    assert share(level="sequence", surrogate=partial(clip, low=0.4, high=0.5)) == [4, 4]
    assert share(surrogate=SURROGATES["cispo"]) == [0, 4]
    assert share(surrogate=lambda lr, adv, logp, mask: -adv * lr.clamp(-0.5, 0.5).exp()) == [2, 4]


def test_half_precision_log_probs_are_widened():
    logp = torch.full((2, 3), -1.0, dtype=torch.bfloat16, requires_grad=True)
    loss, _ = policy_loss(logp, logp.detach() - 0.001, torch.ones(2))
    assert loss.dtype == torch.float32
    loss.backward()
    assert logp.grad.dtype == torch.bfloat16


def test_gradients_match_finite_differences_on_a_small_model():
    g = torch.Generator().manual_seed(5)
    x = torch.randn(4, 3, 6, generator=g, dtype=torch.float64)
    token = torch.randint(0, 5, (4, 3), generator=g)
    theta = 0.3 * torch.randn(6, 5, generator=g, dtype=torch.float64)
    old = torch.log_softmax(x @ (theta + 0.05), -1).gather(-1, token[..., None]).squeeze(-1) + 0.1
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    adv = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    # Surrogates whose weight is detached are not the derivative of their value, by design.
    for name in ("clip", "sapo", "dro", "reinforce"):

        def objective(weights, name=name):
            logp = torch.log_softmax(x @ weights, -1).gather(-1, token[..., None]).squeeze(-1)
            penalty = 0.2 * kl(logp, old, "k2")
            return policy_loss(logp, old, adv, mask, surrogate=SURROGATES[name], penalty=penalty)[0]

        assert torch.autograd.gradcheck(objective, theta.clone().requires_grad_(), atol=1e-6)


def test_kl_values():
    logp, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    close(kl(logp, ref, "k1"), [[0.5, -1.0]], 1e-6)
    close(kl(logp, ref, "k2"), [[0.125, 0.5]], 1e-6)
    k3 = [[math.exp(-0.5) - 0.5, math.exp(1.0) - 2]]
    close(kl(logp, ref, "k3"), k3, 1e-6)
    close(kl(logp, ref, "k3+"), k3, 1e-6)
    tiny = kl(torch.tensor([[1e-4]]), torch.tensor([[0.0]]), "k3")
    close(tiny, [[5e-9]], 1e-10)


def test_only_k2_and_k3_plus_have_the_gradient_of_the_kl():
    g = torch.Generator().manual_seed(6)
    logits, ref = (torch.randn(7, generator=g, dtype=torch.float64) for _ in range(2))
    ref = ref.log_softmax(0)
    logits.requires_grad_()
    logp = logits.log_softmax(0)
    probs = logp.exp()
    (exact,) = torch.autograd.grad((probs * (logp - ref)).sum(), logits, retain_graph=True)
    error = {}
    for kind in ("k1", "k2", "k3", "k3+"):
        expected = (probs.detach() * kl(logp[None], ref[None], kind)[0]).sum()
        (grad,) = torch.autograd.grad(expected, logits, retain_graph=True)
        error[kind] = float((grad - exact).norm())
    weighted = (probs / probs.detach() * probs.detach() * kl(logp[None], ref[None], "k3")[0]).sum()
    (grad,) = torch.autograd.grad(weighted, logits, retain_graph=True)
    assert float((grad - exact).norm()) < 1e-12  # k3 times the ratio
    assert error["k2"] < 1e-12
    assert error["k3+"] < 1e-12
    assert error["k1"] > 0.1
    assert error["k3"] > 0.05
    for kind in ("k1", "k3", "k3+"):  # unbiased values
        value = (probs * kl(logp[None], ref[None], kind)[0]).sum()
        close(value.detach(), (probs * (logp - ref)).sum().detach(), 1e-12)


def test_gaussian_kl_is_torchs_per_element():
    g = torch.Generator().manual_seed(7)
    mean, ref = torch.randn(2, 3, 4, 5, generator=g), torch.randn(2, 3, 4, 5, generator=g)
    for std in (0.7, torch.tensor([0.5, 0.7, 2.0]), torch.rand(2, 3, generator=g) + 0.1):
        wide = torch.as_tensor(std).expand(2, 3)[..., None, None].expand_as(mean)
        want = torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, wide), torch.distributions.Normal(ref, wide)
        )
        close(gaussian_kl(mean, ref, std), want.mean((2, 3)), 1e-5)
    close(gaussian_kl(mean[..., 0, 0], ref[..., 0, 0], 0.5), 2 * (mean - ref)[..., 0, 0].square(), 1e-5)


def test_gaussian_kl_of_an_ode_step_is_nan_and_masked_without_a_trace():
    mean = torch.ones(2, 2, 4, requires_grad=True)
    std = torch.tensor([0.5, 0.0])
    penalty = gaussian_kl(mean, torch.zeros(2, 2, 4), std)
    assert penalty.isnan().tolist() == [[False, True]] * 2
    logp, mask = torch.zeros(2, 2), torch.tensor([[1, 0]] * 2)
    loss, _ = policy_loss(logp, None, torch.zeros(2), mask, penalty=penalty)
    (grad,) = torch.autograd.grad(loss, mean)
    close(loss.detach(), 2.0, 1e-6)
    close(grad, torch.tensor([0.5, 0.0])[None, :, None].expand(2, 2, 4), 1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"level": "row"}, "`level` is 'row'"),
        ({"reduce": "mean"}, "`reduce` is 'mean'"),
        ({"denom": 0}, "`denom` is 0"),
        ({"advantages": torch.zeros(4)}, "`advantages` has shape"),
        ({"old_logp": torch.zeros(2, 4)}, "`old_logp` has shape"),
        ({"mask": torch.ones(3, 3)}, "`mask` has shape"),
        ({"weight": torch.ones(4)}, "`weight` has shape"),
        ({"penalty": torch.ones(1, 2, 3)}, "`penalty` has shape"),
        ({"logp": torch.zeros(3)}, "`logp` has shape"),
    ],
)
def test_user_errors_say_what_to_write(change, words):
    arguments = {"logp": torch.zeros(2, 3), "old_logp": None, "advantages": torch.zeros(2), **change}
    with pytest.raises(ValueError, match=words):
        policy_loss(**arguments)


def test_a_reference_gets_no_gradient():
    policy, reference = torch.zeros(2, 3), torch.ones(2, 3, requires_grad=True)
    assert not any(kl(policy, reference, kind).requires_grad for kind in ("k1", "k2", "k3", "k3+"))
    assert not gaussian_kl(policy, reference, reference).requires_grad


def test_only_the_policy_gets_a_gradient():
    policy, others = torch.zeros(2, 3), [torch.ones(2, 3, requires_grad=True) for _ in range(3)]
    loss, _ = policy_loss(policy, others[0], others[1], weight=others[2])
    assert not loss.requires_grad
    policy.requires_grad_()
    _, metrics = policy_loss(policy, others[0], others[1], weight=others[2], penalty=policy)
    assert not any(pair.requires_grad for pair in metrics.values())


def test_kl_errors():
    with pytest.raises(ValueError, match="k1, k2"):
        kl(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
    with pytest.raises(ValueError, match="`ref_mean`"):
        gaussian_kl(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), 1.0)
    with pytest.raises(ValueError, match="`std` has shape"):
        gaussian_kl(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.ones(2))
