"""Ratios of units: value and gradient of the pooled form, and what a unit must not see."""

import math
from functools import partial

import pytest
import torch

from flowgrpo.core.bounds import bapo
from flowgrpo.core.objectives import policy_loss
from flowgrpo.core.pooled_ratios import dhpo, per_unit, pooled_per_unit, sspo, unit_weights
from flowgrpo.core.surrogates import cispo, clip, pooled_per_column

NAN = math.nan
UNITS = torch.tensor([[7, 7, 3, 3, 3, 9], [0, 1, 1, 0, 0, 0], [4, 4, 4, 4, 4, 4]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
ADV = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    logp = -1 - torch.rand(3, 6, generator=g, dtype=torch.float64)
    return logp, logp + 0.3 * torch.randn(3, 6, generator=g, dtype=torch.float64)


def units_of(row):
    """Columns of each unit of a row, by hand."""
    found = {}
    for t in range(6):
        if MASK[row, t]:
            found.setdefault(UNITS[row, t].item(), []).append(t)
    return list(found.values())


def run(logp, *args, **options):
    leaf = logp.clone().requires_grad_()
    loss, _ = policy_loss(leaf, *args, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def test_each_column_has_its_units_mean_and_its_own_gradient():
    x = torch.tensor([[1.0, 3.0, 5.0, 6.0, 10.0, NAN]], requires_grad=True)
    got = pooled_per_unit(x, UNITS[:1], MASK[:1])
    assert got[0, :5].tolist() == [2.0, 2.0, 7.0, 7.0, 7.0]
    (grad,) = torch.autograd.grad(got[0, 2], x)
    assert grad.tolist() == [[0, 0, 1, 0, 0, 0]]
    # A unit without a masked column has no mean, but a number.
    assert pooled_per_unit(
        torch.tensor([[1.0, 2, 5]]), torch.tensor([[0, 0, 1]]), torch.tensor([[1, 1, 0]])
    ).tolist() == [[1.5, 1.5, 0.0]]


def test_rows_do_not_share_units_and_one_unit_is_the_row():
    x, _ = data()
    one = torch.zeros_like(UNITS)
    torch.testing.assert_close(pooled_per_unit(x, one, MASK)[MASK], pooled_per_column(x, MASK)[MASK])
    alone = torch.arange(6).expand(3, 6)
    torch.testing.assert_close(pooled_per_unit(x, alone, MASK)[MASK], x[MASK])


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.02, 0.05)])
def test_value_and_gradient_are_those_of_the_pooled_form(bounds):
    logp, old = data()
    surrogate = per_unit(partial(clip, low=bounds[0], high=bounds[1]), UNITS)
    got = run(logp, old, ADV, MASK, surrogate=surrogate, weight=unit_weights(UNITS, MASK), reduce="sequence")
    leaf = logp.clone().requires_grad_()
    rows = []
    for row in (0, 1):
        terms = []
        for columns in units_of(row):
            ratio = (leaf[row, columns] - old[row, columns]).mean().exp()
            bounded = ratio.clamp(1 - bounds[0], 1 + bounds[1])
            terms.append(-torch.minimum(ADV[row] * ratio, ADV[row] * bounded))
        rows.append(torch.stack(terms).mean())
    want = torch.stack(rows).mean()
    torch.testing.assert_close(got[0], want.detach(), atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(got[1], torch.autograd.grad(want, leaf)[0], atol=1e-7, rtol=1e-6)


def test_the_graph_stays_per_column():
    logp, old = data()
    options = {"surrogate": per_unit(clip, UNITS), "reduce": "sequence"}
    _, whole = run(logp, old, ADV, MASK, **options)
    for t in range(6):
        column = logp[:, t].clone().requires_grad_()
        mixed = torch.stack([column if u == t else logp[:, u] for u in range(6)], 1)
        loss, _ = policy_loss(mixed, old, ADV, MASK, **options)
        torch.testing.assert_close(torch.autograd.grad(loss, column)[0], whole[:, t])


def of_sentences(units, entropy, mean, **options):
    """SSPO with the arguments that a run gives it."""
    return partial(sspo, units=units, entropy=entropy, mean_entropy=mean, **options)


def refused(**options):
    return of_sentences(UNITS, torch.ones(3, 6), 1.0, **options)(torch.zeros(3, 6), ADV, torch.zeros(3, 6), MASK)


def test_weights_by_hand():
    """Row 0: units of 2 and 3 of 5 columns, so 5 / (2 * 2) and 5 / (2 * 3). Row 1: two units of 2 of 4."""
    want = torch.tensor([[5 / 4, 5 / 4, 5 / 6, 5 / 6, 5 / 6, 0], [1, 1, 1, 1, 0, 0], [0] * 6])
    torch.testing.assert_close(unit_weights(UNITS, MASK), want)
    torch.testing.assert_close(unit_weights(torch.zeros_like(UNITS), MASK), MASK.float())


@pytest.mark.parametrize("poison", [NAN, math.inf])
def test_padding_and_the_ids_of_units_do_not_matter(poison):
    logp, old = data()
    entropy = torch.rand(3, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def evaluate(fill, units):
        spoil = [t.masked_fill(~MASK, fill) for t in (logp, old, entropy)]
        surrogate = of_sentences(units, spoil[2], 0.4)
        return run(spoil[0], spoil[1], ADV, MASK, surrogate=surrogate, reduce="sequence")

    clean, spoilt = evaluate(0.0, UNITS), evaluate(poison, (10 - UNITS).masked_fill(~MASK, 4))
    for got, want in zip(spoilt, clean):
        torch.testing.assert_close(got, want)
    assert spoilt[1].isfinite().all()


@pytest.mark.parametrize("surrogate", [clip, cispo, dhpo])
def test_micro_batches_add_up(surrogate):
    logp, old = data()

    def loss(rows):
        chosen = surrogate if surrogate is dhpo else per_unit(surrogate, UNITS[rows])
        return run(logp[rows], old[rows], ADV[rows], MASK[rows], surrogate=chosen, reduce="sequence", denom=2)

    whole, parts = loss([0, 1, 2]), [loss([2, 1]), loss([0])]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(torch.cat([parts[1][1], parts[0][1].flip(0)]), whole[1])


def test_on_policy_units_change_nothing():
    logp, _ = data()
    want = run(logp, None, ADV, MASK)
    for surrogate in (per_unit(clip, UNITS), of_sentences(UNITS, torch.ones(3, 6), 1.0), dhpo, partial(dhpo, mix=0.3)):
        got = run(logp, None, ADV, MASK, surrogate=surrogate)
        torch.testing.assert_close(got[1], want[1])


def test_sspo_widens_the_clip_of_an_uncertain_unit():
    """Entropies 0.3 and 0.6 about 0.45: clips times 2/3 and 4/3. Ratios 1.2 and 1.2 at high = 0.2."""
    units, mask = torch.tensor([[0, 0, 1, 1]]), torch.ones(1, 4, dtype=torch.bool)
    entropy = torch.tensor([[0.2, 0.4, 0.6, 0.6]], dtype=torch.float64)
    for value, adv, bounds in ((1.2, 1.0, (1 + 0.2 * 2 / 3, 1.2)), (0.8, -1.0, (1 - 0.2 * 2 / 3, 0.8))):
        leaf = torch.full((1, 4), math.log(value), dtype=torch.float64, requires_grad=True)
        loss = of_sentences(units, entropy, 0.45)(leaf, torch.tensor([adv]), leaf, mask)
        want = -adv * torch.tensor([[bounds[0]] * 2 + [bounds[1]] * 2], dtype=torch.float64)
        torch.testing.assert_close(loss.detach(), want)
        assert (torch.autograd.grad(loss.sum(), leaf)[0] != 0).tolist() == [[False, False, True, True]]
    # The scaling is bounded: an entropy 100 times the mean doubles the clip, one of 0 halves it.
    leaf = torch.tensor([[math.log(1.39), math.log(1.11)]])
    far = torch.tensor([[45.0, 0.0]])
    got = of_sentences(torch.tensor([[0, 1]]), far, 0.45)(leaf, torch.ones(1), leaf, torch.ones(1, 2).bool())
    torch.testing.assert_close(got, torch.tensor([[-1.39, -1.1]]))
    assert not of_sentences(units, entropy.requires_grad_(), 0.45)(
        torch.zeros(1, 4), torch.ones(1), leaf, mask
    ).requires_grad


def test_sspo_of_a_step_without_entropy_is_the_plain_clip():
    leaf, mask = torch.full((1, 2), math.log(1.3)), torch.ones(1, 2, dtype=torch.bool)
    got = of_sentences(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2), 0.0)(leaf, torch.ones(1), leaf, mask)
    torch.testing.assert_close(got, torch.full((1, 2), -1.2))


def test_sspo_without_spread_is_a_clip_of_units():
    logp, old = data()
    entropy = torch.rand(3, 6, dtype=torch.float64)
    got = run(logp, old, ADV, MASK, surrogate=of_sentences(UNITS, entropy, 0.5, low=0.1, high=0.2, spread=1.0))
    want = run(logp, old, ADV, MASK, surrogate=per_unit(partial(bapo, lower=0.9, upper=1.2), UNITS))
    torch.testing.assert_close(got[1], want[1])


def test_dhpo_mixes_what_is_clipped_already():
    """Ratios 2 and 1/2 have a mean of 1 that no clip cuts; the first column alone is cut at 1.2."""
    leaf = torch.tensor([[math.log(2), -math.log(2)]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = dhpo(leaf, torch.ones(1), leaf, mask, mix=0.25)
    torch.testing.assert_close(loss.detach(), -torch.tensor([[0.75 * 1.2 + 0.25, 0.75 * 0.5 + 0.25]]).double())
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(grad, -torch.tensor([[0.25, 0.75 * 0.5 + 0.25]]).double())
    halves = dhpo(leaf, torch.ones(1), leaf, mask).detach()
    torch.testing.assert_close(halves, -torch.tensor([[0.5 * 1.2 + 0.5, 0.5 * 0.5 + 0.5]]).double())
    tokens = dhpo(leaf, -torch.ones(1), leaf, mask, mix=0.0).detach()
    torch.testing.assert_close(tokens, torch.tensor([[2.0, 0.8]]).double())
    coarse = dhpo(leaf + 0.1, torch.ones(1), leaf, mask, mix=1.0)
    torch.testing.assert_close(coarse.detach(), torch.full((1, 2), -1.0004, dtype=torch.float64))
    coarse = dhpo(leaf - 0.1, -torch.ones(1), leaf, mask, mix=1.0)
    torch.testing.assert_close(coarse.detach(), torch.full((1, 2), 0.9997, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pooled_per_unit(torch.zeros(3, 6), UNITS[:2], MASK), "`units` has shape"),
        (lambda: refused(spread=0.5), "spread=0.5"),
        (lambda: refused(low=-0.1), "low=-0.1"),
        (lambda: refused(high=-0.1), "high=-0.1"),
        (lambda: refused(low=0.5, spread=2.0), r"low \* spread < 1"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
