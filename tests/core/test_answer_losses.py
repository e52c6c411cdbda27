"""Losses of pairs and groups: closed forms, gradients by hand, and which samples are compared."""

import math

import pytest
import torch

from flowgrpo.core.answer_losses import (
    contrastive,
    disco,
    dpo,
    group_regression,
    inpo,
    likelihood,
    preferred_pairs,
    real,
    rpo,
    simpo,
)
from flowgrpo.core.forward_process import Noised, flow_dpo
from flowgrpo.core.preference_losses import bradley_terry, pairs_of

NAN = math.nan


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_extremes_are_the_best_and_the_worst_of_each_group():
    rewards = torch.tensor([0.2, 0.9, 0.5, 3.0, 3.0, 0.1, NAN, 7.0])
    groups = [5, 5, 5, 2, 2, 5, 5, 1]
    assert pairs_of(rewards, groups).tolist() == [[1, 5]]  # equal rewards, and one alone, make no pair
    assert pairs_of(rewards, groups, margin=0.79).tolist() == [[1, 5]]
    assert pairs_of(rewards, groups, margin=0.81).tolist() == []
    assert pairs_of(torch.tensor([1.0, 0.0, 1.0, 0.0]), [0] * 4).tolist() == [[0, 1]]  # the first of equals


def test_all_pairs_with_a_margin():
    rewards, groups = torch.tensor([0.0, 1.0, 0.4, 5.0, NAN]), [0, 0, 0, 1, 0]
    assert pairs_of(rewards, groups, how="all").tolist() == [[1, 0], [1, 2], [2, 0]]
    assert pairs_of(rewards, groups, how="all", margin=0.5).tolist() == [[1, 0], [1, 2]]
    assert pairs_of(torch.tensor([NAN, NAN]), [0, 0]).tolist() == []


@pytest.mark.parametrize("how", ["extremes", "all"])
def test_pairs_follow_a_permutation(how):
    g = torch.Generator().manual_seed(0)
    rewards, groups, order = torch.rand(12, generator=g), torch.arange(12) % 3, torch.randperm(12, generator=g)
    whole = pairs_of(rewards, groups, how=how)
    moved = order[pairs_of(rewards[order], groups[order] + 4, how=how)]
    assert sorted(whole.tolist()) == sorted(moved.tolist())
    assert len(whole) == {"extremes": 3, "all": 18}[how]
    assert (rewards[whole[:, 0]] > rewards[whole[:, 1]]).all()


PAIRS = torch.tensor([[0, 2], [1, 2]])


def test_dpo_by_hand():
    logp, ref = double([-1.0, -2.0, -3.0, -9.0]).requires_grad_(), double([-1.5, -1.5, -2.0, 0.0]).requires_grad_()
    loss = dpo(logp, ref, PAIRS, beta=0.4)
    margins = [0.4 * (0.5 - -1.0), 0.4 * (-0.5 - -1.0)]
    torch.testing.assert_close(loss.detach(), double([-math.log(sigmoid(m)) for m in margins]))
    loss.sum().backward()
    pull = [0.4 * sigmoid(-m) for m in margins]
    torch.testing.assert_close(logp.grad, double([-pull[0], -pull[1], sum(pull), 0.0]))
    assert ref.grad is None


def test_a_doubted_preference_has_its_optimum_at_its_odds():
    margin = double([0.3, math.log(9)]).requires_grad_()
    loss = bradley_terry(margin, 0.1)
    want = [-0.9 * math.log(sigmoid(m)) - 0.1 * math.log(sigmoid(-m)) for m in (0.3, math.log(9))]
    torch.testing.assert_close(loss.detach(), double(want))
    (grad,) = torch.autograd.grad(loss.sum(), margin)
    assert grad[0] < 0
    assert abs(grad[1]) < 1e-12
    smoothed = dpo(double([0.3, 0.0]), double([0.0, 0.0]), torch.tensor([[0, 1]]), beta=1.0, smoothing=0.1)
    torch.testing.assert_close(smoothed, double(want[:1]))


def test_dpo_is_flow_dpo_with_a_matching_error_as_log_prob():
    velocity, reference = double([[2.0], [3.0]]), double([[3.0], [2.0]])
    zeros = torch.zeros_like(velocity)
    rows = Noised(velocity, velocity, reference, zeros, zeros + 1, 0.5, double([1.0, -1.0]), torch.tensor([0, 0]))
    loss, _ = flow_dpo(rows, beta=0.6)
    want = dpo(-rows.error(velocity), -rows.error(reference), torch.tensor([[0, 1]]), beta=0.3)
    torch.testing.assert_close(loss.sum(), want[0].float())


def test_rpo_is_dpo_and_the_mean_log_prob_of_the_winner():
    logp, ref = torch.tensor([-1.0, -4.0, -2.0]), torch.tensor([-1.5, -3.0, -2.0])
    pairs, lengths = torch.tensor([[0, 1], [2, 1]]), torch.tensor([2, 1, 4])
    loss = rpo(logp, ref, lengths, pairs, beta=0.3, alpha=0.5)
    hand = [-math.log(sigmoid(0.3 * 1.5)) + 0.5 * 1.0 / 2, -math.log(sigmoid(0.3 * 1.0)) + 0.5 * 2.0 / 4]
    torch.testing.assert_close(loss, torch.tensor(hand))
    torch.testing.assert_close(rpo(logp, ref, lengths, pairs, alpha=0.0), dpo(logp, ref, pairs))
    torch.testing.assert_close(
        rpo(logp, ref, lengths, pairs, smoothing=0.2), dpo(logp, ref, pairs, smoothing=0.2) + torch.tensor([0.5, 0.5])
    )


def test_rpo_raises_the_winner_where_dpo_lets_both_fall():
    """At a lead that DPO finds large enough, only the term of the winner has a gradient."""
    logp = double([-30.0, -90.0]).requires_grad_()
    rpo(
        logp, double([-10.0, -10.0]), torch.tensor([10, 10]), torch.tensor([[0, 1]]), beta=1.0, alpha=1.0
    ).sum().backward()
    torch.testing.assert_close(logp.grad, double([-0.1, 0.0]))


def test_simpo_by_hand():
    logp = double([-2.0, -9.0, -3.0]).requires_grad_()
    loss = simpo(logp, torch.tensor([2, 3, 6]), PAIRS, beta=2.0, margin=0.5)
    margins = [2 * (-1.0 + 0.5) - 0.5, 2 * (-3.0 + 0.5) - 0.5]
    torch.testing.assert_close(loss.detach(), double([-math.log(sigmoid(m)) for m in margins]))
    loss.sum().backward()
    pull = [2 * sigmoid(-m) for m in margins]
    torch.testing.assert_close(logp.grad, double([-pull[0] / 2, -pull[1] / 3, sum(pull) / 6]))


def test_group_regression_by_hand():
    """Log-ratios 0.1, 0.3 and 0.8 (a group of one): about their means -0.1, 0.1 and 0."""
    old = double([-1.0, -2.0, -3.0])
    leaf = (old + double([0.1, 0.3, 0.8])).requires_grad_()
    loss = group_regression(leaf, old, double([1.0, -1.0, 0.5]), [3, 3, 0], beta=2.0)
    torch.testing.assert_close(loss.detach(), double([(1 + 0.2) ** 2 / 4, (-1 - 0.2) ** 2 / 4, 0.25 / 4]))
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    # -(A - predicted) less its mean over the group.
    torch.testing.assert_close(grad, double([-1.2, 1.2, 0.0]))


def test_group_regression_on_policy_is_reinforce_and_no_constant_matters():
    g = torch.Generator().manual_seed(0)
    groups, logp = torch.arange(6) % 2, torch.randn(6, generator=g, dtype=torch.float64)
    adv = torch.randn(3, 2, generator=g, dtype=torch.float64)
    adv = (adv - adv.mean(0)).flatten()
    leaf = logp.clone().requires_grad_()
    (grad,) = torch.autograd.grad(group_regression(leaf, logp, adv, groups, beta=0.7).sum(), leaf)
    torch.testing.assert_close(grad, -adv)
    shifted = group_regression(logp + 0.1 * adv + torch.where(groups == 0, 3.0, -5.0), logp, adv, groups, beta=10.0)
    torch.testing.assert_close(shifted, torch.zeros_like(shifted), atol=1e-12, rtol=0)


def test_defaults_by_hand():
    rows, pair = double([2.0, 0.0]).requires_grad_(), torch.tensor([[0, 1]])
    torch.testing.assert_close(dpo(rows, double([0.0, 0.0]), pair).item(), -math.log(sigmoid(0.1 * 2)))
    torch.testing.assert_close(simpo(rows, torch.tensor([4, 1]), pair).item(), -math.log(sigmoid(2 * 0.5 - 1)))
    # The log-ratios are 1 and -1 about their mean.
    still = group_regression(rows.detach(), torch.zeros(2).requires_grad_(), rows, [0, 0])
    torch.testing.assert_close(still, double([0.5, 0.5]))
    assert not still.requires_grad
    torch.testing.assert_close(real(rows[:1], torch.tensor([True]), [0]).item(), math.log(1 + math.exp(-2 / 0.5)))


SCORES = [0.4, -0.2, 0.1, 0.3, -0.6]
CORRECT = torch.tensor([True, False, False, True, True])


def test_real_by_hand():
    """Ids 1 and 0: the group of the last two rows comes first, and has no wrong answer."""
    scores = double(SCORES).requires_grad_()
    loss = real(scores, CORRECT, [1, 1, 1, 0, 0], tau=0.5)
    wrong, right = 1 + math.exp(-0.4) + math.exp(0.2), 1 + math.exp(-0.8)
    alone = 1 + math.exp(-0.6) + math.exp(1.2)
    torch.testing.assert_close(loss.detach(), double([math.log(alone), math.log(wrong) + math.log(right)]))
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    want = [-math.exp(-0.8) / right, math.exp(-0.4) / wrong, math.exp(0.2) / wrong]
    want += [-math.exp(-0.6) / alone, -math.exp(1.2) / alone]
    torch.testing.assert_close(grad, 2 * double(want))


def test_real_of_each_row_alone_is_cross_entropy():
    scores = double(SCORES)
    loss = real(scores, CORRECT, [1, 1, 1, 0, 0], tau=0.5, each=True)
    rows = torch.nn.functional.binary_cross_entropy_with_logits(scores / 0.5, CORRECT.double(), reduction="none")
    torch.testing.assert_close(loss, torch.stack([rows[3:].mean(), rows[:3].mean()]))


def test_a_gradient_of_real_is_bounded_however_wrong_the_row():
    scores = double([-1e4, 1e4, 0.0]).requires_grad_()
    (grad,) = torch.autograd.grad(real(scores, torch.tensor([True, False, True]), [0, 0, 0], tau=0.25).sum(), scores)
    torch.testing.assert_close(grad, double([-4.0, 4.0, 0.0]))


def test_inpo_by_hand():
    """The lead of the first winner is 2.0, of the mixture 0.25 * 1.0 + 0.75 * 0.4 = 0.55."""
    logp = double([-1.0, -2.0, -3.0]).requires_grad_()
    ref, old = double([-4.0, 0.0, -5.0]), double([-2.6, -1.0, -3.0])
    loss = inpo(logp, ref, old, torch.tensor([[0, 2]]), eta=0.5, share=0.25)
    torch.testing.assert_close(loss.detach(), double([(2.0 - 0.55 - 1.0) ** 2]))
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, double([0.9, 0.0, -0.9]))
    still = inpo(double([-1.0, -2.0]), double([-9.0, -9.5]), double([-1.0, -2.0]), torch.tensor([[0, 1]]), share=0.0)
    torch.testing.assert_close(still, double([25.0]))  # where the policy sampled, the lead is 0 and the goal 5


def test_contrastive_is_reinforce_on_regularised_rewards_off_policy():
    """d is 0.7, -0.1 and 0.3, and the fourth answer is alone."""
    logp, ref = double([-2.0, -3.0, -1.0, -7.0]).requires_grad_(), double([-5.0, -2.0, -8.0, 0.0])
    loss = contrastive(logp, ref, double([1.0, -0.2, 1.0, 4.0]), [7, 7, 7, 2], beta=0.1)
    near, far = (0.4**2) / 0.4, (0.8**2) / 0.4
    torch.testing.assert_close(loss.detach(), double([(far + near) / 2, (far + near) / 2, near, 0.0]))
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    torch.testing.assert_close(grad, double([-(0.7 - 0.1), -(-0.1 - 0.5), 0.0, 0.0]))


def test_contrastive_of_two_answers_is_ipo():
    """Half of the reference's margin 1 / beta is not enough, and the whole margin is."""
    ref, rewards = double([-2.0, -2.0]), double([1.0, 0.0])
    half = contrastive(double([0.5, -2.0]), ref, rewards, [0, 0], beta=0.2)
    torch.testing.assert_close(half, double([0.2 * (2.5 - 5.0) ** 2 / 4] * 2))
    whole = contrastive(double([3.0, -2.0]), ref, rewards, [0, 0], beta=0.2)
    torch.testing.assert_close(whole, double([0.0, 0.0]))


def test_disco_by_hand():
    """Two correct and two wrong answers, then a group without a wrong one, whose KL is 0.4 above delta."""
    logp = double([-2.0, -3.0, -4.0, -1.0, -6.0]).requires_grad_()
    lengths, right = torch.tensor([2, 1, 4, 2, 3]), torch.tensor([True, True, False, False, True])
    moved = double([0.1, -0.1, 0.0, 0.0, -0.5]).requires_grad_()
    loss = disco(logp, lengths, moved, right, [4, 4, 4, 4, 9], tau=0.5, beta=10.0, delta=0.1)
    hard = 0.5 * math.log((math.exp(-1 / 0.5) + math.exp(-0.5 / 0.5)) / 2)
    torch.testing.assert_close(loss.detach(), double([hard - (-1.0 - 3.0) / 2, 10 * 0.4**2]))
    by_score, by_ratio = torch.autograd.grad(loss.sum(), (logp, moved))
    likely = sigmoid((-0.5 + 1) / 0.5)  # the share of the likelier wrong answer
    torch.testing.assert_close(by_score, double([-0.5 / 2, -0.5 / 1, (1 - likely) / 4, likely / 2, 0.0]))
    torch.testing.assert_close(by_ratio, double([0.0, 0.0, 0.0, 0.0, -2 * 10 * 0.4]))


def test_disco_does_not_weigh_a_group_by_its_difficulty():
    right = torch.tensor([True, False, False, False, True, True, True, False])
    scores, ones, groups = torch.zeros(8, dtype=torch.float64).requires_grad_(), torch.ones(8), [0] * 4 + [1] * 4
    loss = disco(scores, ones, torch.zeros(8, dtype=torch.float64), right, groups, delta=0.0)
    (grad,) = torch.autograd.grad(loss.sum(), scores)
    assert [grad[right][:1].sum().item(), grad[right][1:].sum().item()] == pytest.approx([-1.0, -1.0])
    far = disco(scores.detach(), ones, double([math.log(2)] * 8), right, groups, score="ratio", beta=0.0)
    torch.testing.assert_close(far, double([0.0, 0.0]))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: dpo(x, double([0.1] * 5), PAIRS).sum(),
        lambda x: simpo(x, torch.arange(1, 6), PAIRS).sum(),
        lambda x: rpo(x, torch.zeros(5, dtype=x.dtype), torch.arange(1, 6), PAIRS).sum(),
        lambda x: group_regression(x, double([0.1] * 5), double(SCORES), [0, 0, 1, 1, 1]).sum(),
        lambda x: real(x, CORRECT, [0, 0, 1, 1, 1]).sum(),
        lambda x: real(x, CORRECT, [0, 0, 1, 1, 1], each=True).sum(),
        lambda x: inpo(x, double([0.1] * 5), double(SCORES[::-1]), PAIRS).sum(),
        lambda x: contrastive(x, double([0.1] * 5), double(SCORES[::-1]), [0, 0, 1, 1, 1]).sum(),
        lambda x: disco(x, torch.arange(1, 6), x - 0.3, CORRECT, [0, 0, 1, 1, 1], delta=0.05).sum(),
    ],
)
def test_gradients_are_those_of_finite_differences(loss):
    assert torch.autograd.gradcheck(loss, double(SCORES).requires_grad_())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pairs_of(torch.zeros(2), [0, 0], how="some"), "`how` is 'some'"),
        (lambda: pairs_of(torch.zeros(2), [0, 0], margin=-1.0), "`margin` is -1.0"),
        (lambda: pairs_of(torch.zeros(2, 1), [0, 0]), r"shape \(2, 1\)"),
        (lambda: dpo(torch.zeros(2, 3), torch.zeros(2, 3), PAIRS), r"`logp` \(2, 3\)"),
        (lambda: simpo(torch.zeros(2), torch.ones(2), PAIRS[0]), r"`pairs` \(2,\)"),
        (lambda: dpo(torch.zeros(3), torch.zeros(3), PAIRS, smoothing=0.5), "`smoothing` is 0.5"),
        (lambda: group_regression(torch.zeros(1), torch.zeros(1), torch.zeros(1), [0], beta=0.0), "`beta` is 0.0"),
        (lambda: real(torch.zeros(1), CORRECT[:1], [0], tau=0.0), "`tau` is 0.0"),
        (lambda: real(torch.zeros(1), CORRECT, [0]), r"`correct` \(5,\)"),
        (lambda: inpo(torch.zeros(3), torch.zeros(3), torch.zeros(3), PAIRS, eta=0.0), "eta=0.0, share=0.5"),
        (lambda: inpo(torch.zeros(3), torch.zeros(3), torch.zeros(3), PAIRS[0]), r"`pairs` \(2,\)"),
        (lambda: contrastive(torch.zeros(1), torch.zeros(1), torch.zeros(1), [0], beta=0.0), "`beta` is 0.0"),
        (lambda: contrastive(torch.zeros(2), torch.zeros(1), torch.zeros(2), [0, 0]), r"`ref_logp` \(1,\)"),
        (lambda: disco(*[torch.ones(1)] * 3, CORRECT[:1], [0], tau=0.0), "tau=0.0, beta=1000.0"),
        (lambda: disco(*[torch.ones(1)] * 3, CORRECT, [0]), r"`correct` \(5,\)"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_likelihood_of_an_answer_is_the_mean_over_its_tokens():
    logp = torch.tensor([-6.0, -1.0], requires_grad=True)
    loss = likelihood(logp, torch.tensor([3, 2]))
    assert loss.tolist() == [2.0, 0.5]
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([-1 / 3, -1 / 2]))


def test_a_pair_is_preferred_if_its_winner_is_likelier():
    pairs = torch.tensor([[0, 1], [1, 0], [2, 3]])
    assert preferred_pairs(torch.tensor([2.0, 1.0, 0.5, 0.5]), pairs).tolist() == [1.0, 0.0, 0.5]
