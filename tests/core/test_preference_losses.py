"""Losses of preferences: values by hand, optima, and what has no gradient. tests/releases has TRL's numbers."""

import math

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.answer_losses import ANSWER_LOSSES, dpo, kto, optimal, rpo, simpo
from flowgrpo.core.preference_losses import (
    apo,
    bco,
    cpo,
    discopop,
    dpo_norm,
    exo,
    f_dpo,
    hinge,
    ipo,
    mpo,
    nca,
    orpo,
    robust,
    sppo,
    tpo,
)
from flowgrpo.parts.asked import asked

PAIR = torch.tensor([[0, 1]])


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


LOGP, REF = double([-4.0, -7.0]), double([-5.0, -6.5])  # log-ratios 1.0 and -0.5
LENGTHS = torch.tensor([4, 2])  # means of the log-ratios 0.25 and -0.25, of the log-probs -1 and -3.5


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [
        (hinge(LOGP, REF, PAIR, beta=0.4), 1 - 0.4 * 1.5),
        (hinge(LOGP, REF, PAIR, beta=0.8), 0.0),
        (ipo(LOGP, REF, LENGTHS, PAIR, beta=0.4), (0.5 - 1.25) ** 2),
        (ipo(LOGP, REF, LENGTHS, PAIR, beta=0.4, mean=False), (1.5 - 1.25) ** 2),
        (nca(LOGP, REF, PAIR, beta=2.0), -log_sigmoid(2) - (log_sigmoid(-2) + log_sigmoid(1)) / 2),
        (bco(LOGP, REF, PAIR, beta=2.0), -log_sigmoid(2) - log_sigmoid(1)),
        (sppo(LOGP, REF, PAIR, beta=0.5), (1.0 - 1.0) ** 2 + (-0.5 + 1.0) ** 2),
        (apo(LOGP, REF, PAIR, beta=2.0), math.exp(log_sigmoid(-2)) + math.exp(log_sigmoid(-1))),
        (apo(LOGP, REF, PAIR, beta=2.0, anchor="down"), math.exp(log_sigmoid(2)) + math.exp(log_sigmoid(-3))),
        (f_dpo(LOGP, REF, PAIR, beta=0.5, divergence="forward"), -log_sigmoid(0.5 * (math.exp(0.5) - math.exp(-1)))),
        (f_dpo(LOGP, REF, PAIR, beta=0.5), -log_sigmoid(0.5 * (log_sigmoid(1) - log_sigmoid(-0.5)))),
        (
            f_dpo(LOGP, REF, PAIR, beta=0.5, divergence="alpha", alpha=3.0),
            -log_sigmoid(0.5 * (math.exp(2) - math.exp(-1)) / 2),
        ),
        (dpo_norm(LOGP, REF, LENGTHS, PAIR, beta=4.0), -log_sigmoid(2)),
        (dpo_norm(LOGP, REF, LENGTHS, PAIR, beta=4.0, smoothing=0.2), -0.8 * log_sigmoid(2) - 0.2 * log_sigmoid(-2)),
        (cpo(LOGP, LENGTHS, PAIR, beta=0.5, alpha=0.3), -log_sigmoid(1.5) + 0.3),
        (
            cpo(LOGP, LENGTHS, PAIR, beta=0.5, alpha=0.0, smoothing=0.1),
            -0.9 * log_sigmoid(1.5) - 0.1 * log_sigmoid(-1.5),
        ),
        (simpo(LOGP, LENGTHS, PAIR, beta=1.0, margin=0.5, alpha=1.0), -log_sigmoid(math.exp(3.5) - math.exp(1) - 0.5)),
        (
            orpo(LOGP, LENGTHS, PAIR, weight=0.2),
            1 - 0.2 * log_sigmoid((-1 - math.log(1 - math.exp(-1))) - (-3.5 - math.log(1 - math.exp(-3.5)))),
        ),
        (
            mpo(LOGP, REF, LENGTHS, PAIR, beta=2.0, preference=0.8, quality=0.2, alpha=0.5),
            -0.8 * log_sigmoid(3) - 0.2 * (log_sigmoid(2) + log_sigmoid(1)) + 0.5,
        ),
    ],
)
def test_by_hand(loss, by_hand):
    torch.testing.assert_close(loss, double([by_hand]))


@pytest.mark.parametrize(
    ("loss", "by_hand"),
    [
        (hinge(LOGP, REF, PAIR), 1 - 0.15),
        (ipo(LOGP, REF, LENGTHS, PAIR), (0.5 - 5) ** 2),
        (robust(LOGP, REF, PAIR), (0.1 * log_sigmoid(-0.15) - 0.9 * log_sigmoid(0.15)) / 0.8),
        (nca(LOGP, REF, PAIR), -log_sigmoid(0.1) - (log_sigmoid(-0.1) + log_sigmoid(0.05)) / 2),
        (bco(LOGP, REF, PAIR), -log_sigmoid(0.1) - log_sigmoid(0.05)),
        (sppo(LOGP, REF, PAIR), 4.0**2 + 4.5**2),
        (apo(LOGP, REF, PAIR), math.exp(log_sigmoid(-0.1)) + math.exp(log_sigmoid(-0.05))),
        (f_dpo(LOGP, REF, PAIR), -log_sigmoid(0.1 * (log_sigmoid(1) - log_sigmoid(-0.5)))),
        (dpo_norm(LOGP, REF, LENGTHS, PAIR), -log_sigmoid(2.5)),
        (mpo(LOGP, REF, LENGTHS, PAIR), -0.8 * log_sigmoid(0.15) - 0.2 * (log_sigmoid(0.1) + log_sigmoid(0.05)) + 1),
        (cpo(LOGP, LENGTHS, PAIR), -log_sigmoid(0.3) + 1),
        (simpo(LOGP, LENGTHS, PAIR), -log_sigmoid(4)),
        (orpo(LOGP, LENGTHS, PAIR) - orpo(LOGP, LENGTHS, PAIR, weight=0.1), 0.0),
    ],
)
def test_defaults_by_hand(loss, by_hand):
    torch.testing.assert_close(loss, double([by_hand]))


def test_the_reference_has_no_gradient():
    logp, ref = LOGP.clone().requires_grad_(), REF.clone().requires_grad_()
    has = {
        "logp": logp, "ref_logp": ref, "lengths": LENGTHS, "pairs": PAIR, "advantages": double([1.0, -1.0]),
        "drift": double(0.3), "groups": [0, 0],
    }  # fmt: skip
    with_reference = (hinge, ipo, robust, exo, nca, bco, sppo, apo, discopop, f_dpo, dpo_norm, mpo, kto, optimal)
    for loss in with_reference:
        names = loss.__code__.co_varnames[: loss.__code__.co_argcount]
        assert "ref_logp" in names
        loss(*(has[name] for name in names)).sum().backward()
    assert ref.grad is None
    assert (logp.grad != 0).all()
    assert {loss.__name__ for loss in with_reference} < set(ANSWER_LOSSES)


def test_a_robust_loss_of_labels_that_are_wrong_at_times_is_dpo_on_average():
    """With the probability 0.2 the pair is the other way round."""
    turned = PAIR.flip(1)
    found = 0.8 * robust(LOGP, REF, PAIR, smoothing=0.2) + 0.2 * robust(LOGP, REF, turned, smoothing=0.2)
    torch.testing.assert_close(found, dpo(LOGP, REF, PAIR))
    torch.testing.assert_close(robust(LOGP, REF, PAIR, smoothing=0.0), dpo(LOGP, REF, PAIR))


def test_exo_is_least_at_the_odds_of_the_labels():
    lead = math.log(0.9 / 0.1)
    logp = double([lead, 0.0]).requires_grad_()
    loss = exo(logp, double([0.0, 0.0]), PAIR, beta=1.0, smoothing=0.1)
    torch.testing.assert_close(loss.detach(), double([0.0]), atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), logp)[0], double([0.0, 0.0]), atol=1e-12, rtol=0)
    for shift in (-1.0, 1.0):
        assert exo(double([lead + shift, 0.0]), double([0.0, 0.0]), PAIR, beta=1.0, smoothing=0.1) > 0
    half = math.log(0.5 / 0.999) / 2 + math.log(0.5 / 0.001) / 2
    torch.testing.assert_close(exo(REF, REF, PAIR), double([half]))


def test_discopop_blends_by_the_lead():
    share = math.exp(log_sigmoid(0.15 / 0.05))
    by_hand = -(1 - share) * log_sigmoid(0.15) + share * math.exp(-0.15)
    torch.testing.assert_close(discopop(LOGP, REF, PAIR), double([by_hand]))
    logp = torch.tensor([-3e4, 0.0]).requires_grad_()
    loss = discopop(logp, torch.zeros(2), PAIR, beta=1.0)
    torch.testing.assert_close(loss.detach(), torch.tensor([3e4]))
    assert torch.autograd.grad(loss.sum(), logp)[0].isfinite().all()


def test_odds_of_a_sure_answer_are_finite():
    logp = torch.tensor([0.0, -2.0]).requires_grad_()
    loss = orpo(logp, torch.tensor([1, 1]), PAIR)
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), logp)[0].isfinite().all()
    almost = orpo(double([-2e-6, -2.0]), torch.tensor([1, 1]), PAIR)
    odds = math.log(math.exp(-2e-6) / -math.expm1(-2e-6)) - math.log(math.exp(-2) / (1 - math.exp(-2)))
    torch.testing.assert_close(almost, double([2e-6 - 0.1 * log_sigmoid(odds)]))


def test_a_divergence_far_from_the_reference_stays_finite():
    logp = torch.tensor([-300.0, 0.0]).requires_grad_()
    loss = f_dpo(logp, torch.zeros(2), PAIR, divergence="forward")
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), logp)[0].isfinite().all()


def test_a_divergence_near_the_reverse_kl_is_nearly_dpo():
    """In float32 a power of nearly 0 would leave few digits of the log-ratios."""
    logp, ref = LOGP.float(), REF.float()
    near = f_dpo(logp, ref, PAIR, beta=1.0, divergence="alpha", alpha=1.000001)
    torch.testing.assert_close(near, dpo(logp, ref, PAIR, beta=1.0), rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", sorted(ANSWER_LOSSES))
@pytest.mark.parametrize("better", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("worse", [-1e4, 0.0, 1e4])
def test_losses_far_from_the_reference_are_finite(name, better, worse):
    logp = torch.tensor([-20.0, -30.0, -25.0]).requires_grad_()
    ratios = torch.tensor([better, worse, 0.0])
    ref, lengths = logp.detach() - ratios, torch.tensor([1, 100, 7])
    has = {
        "logp": logp, "ref_logp": ref, "old_logp": ref, "lengths": lengths, "log_ratio": (logp - ref) / 100,
        "advantages": torch.tensor([1.0, 0.0, -1.0]), "correct": torch.tensor([True, False, False]),
        "groups": [0, 0, 0], "pairs": PAIR, "drift": torch.tensor(0.0),
    }  # fmt: skip
    loss = ANSWER_LOSSES[name](**{key: has[key] for key in asked(ANSWER_LOSSES[name])})
    assert loss.isfinite().all()
    assert torch.autograd.grad(loss.sum(), logp)[0].isfinite().all()


def test_the_best_answer_is_learned_and_the_others_are_compared():
    """Of the second group, the answers but the best are equal, so it has no loss."""
    logp = double([-4.0, -6.0, -9.0, -1.0, -8.0, -2.0]).requires_grad_()
    advantages, groups = double([0.1, 0.9, -1.0, 1.0, -0.5, -0.5]), [7, 7, 7, 2, 2, 2]
    lengths = torch.tensor([2, 3, 3, 1, 1, 1])
    loss = tpo(logp, lengths, advantages, groups, beta=0.2, alpha=0.5)
    torch.testing.assert_close(loss.detach(), double([-log_sigmoid(0.2 * 5) + 0.5 * 2]))
    loss.sum().backward()
    pull = 0.2 * math.exp(log_sigmoid(-1.0))
    torch.testing.assert_close(logp.grad, double([-pull, -0.5 / 3, pull, 0.0, 0.0, 0.0]))
    long = tpo(logp.detach(), lengths, advantages, groups, beta=2.0, mean=True, margin=0.3)
    torch.testing.assert_close(long, double([-log_sigmoid(2.0 * (-2 + 3) - 0.3) + 2]))
    plain = tpo(logp.detach(), lengths, advantages, groups)
    torch.testing.assert_close(plain, double([-log_sigmoid(0.01 * 5) + 2]))
    assert tpo(LOGP, LENGTHS, double([1.0, 0.0]), [0, 0]).shape == (0,)


def test_good_and_bad_answers_are_worth_most_near_the_drift():
    logp, ref, adv = double([1.0, 1.0, 0.4, 90.0]).requires_grad_(), double([0.0] * 4), double([1.0, 0.0, -1.0, 2.0])
    loss = kto(logp, ref, adv, double(0.4), beta=0.5, desirable=3.0, undesirable=0.5)
    high, low = math.exp(log_sigmoid(0.3)), math.exp(log_sigmoid(-0.3))
    torch.testing.assert_close(loss.detach()[:3], double([3 * low, 0.5 * high, 0.5 * 0.5]))
    slope = torch.autograd.grad(loss.sum(), logp)[0]
    torch.testing.assert_close(slope[:3], double([-1.5 * high * low, 0.25 * high * low, 0.25 * 0.25]))
    assert -1e-10 < slope[3] < 0  # it is good enough already
    same = kto(double([0.1, 0.1]), ref[:2], double([1.0, -1.0]), double(0.1))
    torch.testing.assert_close(same, double([0.5, 0.5]))
    plain = kto(double([1.1, 1.1]), ref[:2], double([1.0, -1.0]), double(0.1))
    torch.testing.assert_close(plain, double([math.exp(log_sigmoid(-0.1)), math.exp(log_sigmoid(0.1))]))


def test_the_regression_is_0_for_the_optimal_policy():
    """The optimum of the reward less beta times the KL has the log-ratio (r - V*) / beta."""
    prior, rewards, beta = double([0.2, 0.5, 0.3]), double([1.0, 0.0, 0.5]), 0.5
    value = beta * (prior * (rewards / beta).exp()).sum().log()
    best = prior * (rewards / beta).exp()
    best = best / best.sum()
    loss = optimal(best.log(), prior.log(), rewards - value, beta=beta)
    torch.testing.assert_close(loss, double([0.0] * 3), atol=1e-12, rtol=0)
    torch.testing.assert_close(optimal(LOGP, REF, double([1.0, -2.0])), double([0.999**2, 1.9995**2]))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: robust(LOGP, REF, PAIR, smoothing=0.5), r"`smoothing` is 0\.5; use a probability in \[0, 0\.5\)"),
        (lambda: cpo(LOGP, LENGTHS, PAIR, smoothing=0.7), r"`smoothing` is 0\.7; use a probability in \[0, 0\.5\)"),
        (lambda: dpo_norm(LOGP, REF, LENGTHS, PAIR, smoothing=-0.1), r"`smoothing` is -0\.1"),
        (lambda: exo(LOGP, REF, PAIR, smoothing=0.0), r"`smoothing` is 0\.0; use a probability in \(0, 0\.5\)"),
        (lambda: exo(LOGP, REF, PAIR, smoothing=0.5), r"`smoothing` is 0\.5; use a probability in \(0, 0\.5\)"),
        (lambda: f_dpo(LOGP, REF, PAIR, divergence="alpha", alpha=1.0), "use loss dpo"),
        (lambda: nca(LOGP, REF, torch.tensor([0, 1])), r"give one sum per row, \(B,\), and \(P, 2\) rows"),
        (lambda: hinge(LOGP, REF[:1], PAIR), r"shapes are `logp` \(2,\), `ref_logp` \(1,\); give all as \(B,\)"),
        (lambda: cpo(LOGP, LENGTHS[:1], PAIR), r"shapes are `logp` \(2,\), `lengths` \(1,\); give all"),
        (lambda: kto(LOGP, REF, double([1.0]), double(0.0)), r"`advantages` \(1,\); give all as \(B,\)"),
        (lambda: optimal(LOGP, REF[:1], REF), r"`ref_logp` \(1,\), `advantages` \(2,\); give all as \(B,\)"),
    ],
)
def test_bad_inputs_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_fine_tuning_on_the_winner_is_that_of_rpo():
    torch.testing.assert_close(
        mpo(LOGP, REF, LENGTHS, PAIR, preference=1.0, quality=0.0, alpha=0.7), rpo(LOGP, REF, LENGTHS, PAIR, alpha=0.7)
    )


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ("{name: f_dpo, alpha: 0.3}", "alpha is 0.3, and only divergence alpha reads it, so it has no effect"),
        ("{name: discopop, tau: 2}", "tau: Input should be less than or equal to 1"),
        ("optimal", r"predicts rewards, and a scale changes them, and advantage.scale is group; use adv"),
    ],
)
def test_options_that_would_mislead_are_refused(loss, why):
    with pytest.raises(RecipeError, match=why):
        load_recipe("text_dpo", [f"objective.loss={loss}"])
