"""Guards of single tokens: which tokens they change, by how much, and that no other token changes."""

import math

import pytest
import torch

from flowgrpo.core.guards import confident_rows, conflict_weights, likelihood_guard, stray_weights
from flowgrpo.core.objectives import policy_loss

NAN, INF = math.nan, math.inf


def guard(change, *args, **options):
    """Penalty and gradient for log-probs that have changed by `change`."""
    old = torch.full_like(torch.tensor(change), -2.0)
    leaf = (old + torch.tensor(change)).requires_grad_()
    penalty = likelihood_guard(leaf, old, *args, **options)
    (grad,) = torch.autograd.grad(penalty.sum(), leaf)
    return penalty.detach(), grad


# The first row fell by 0.3 in all, the second rose by 0.1, the third fell in one token of two.
CHANGE = [[-0.5, 0.4, -0.2], [-0.4, 0.5, 0.0], [-0.1, 0.05, 0.0]]


def test_only_tokens_that_fell_in_rows_that_fell_are_pushed_up():
    penalty, grad = guard(CHANGE)
    torch.testing.assert_close(penalty, torch.tensor([[0.5, 0, 0.2], [0, 0, 0], [0.1, 0, 0]]))
    assert grad.tolist() == [[-1, 0, -1], [0, 0, 0], [-1, 0, 0]]


def test_it_may_guard_only_correct_answers():
    assert guard(CHANGE, None, torch.tensor([1.0, 1.0, -1.0]))[1].tolist() == [[-1, 0, -1], [0, 0, 0], [0, 0, 0]]
    assert guard(CHANGE, None, torch.tensor([0.0, 1.0, 1.0]))[1].tolist() == [[0, 0, 0], [0, 0, 0], [-1, 0, 0]]
    columns = torch.tensor([[1.0, 1.0, -1.0]] * 3)
    assert guard(CHANGE, None, columns)[1][0].tolist() == [-1, 0, 0]


def test_units_are_judged_apart():
    """Units of the first row change by -0.1 and -0.2, of the second by -0.4 and 0.5, of the third by -0.1 and 0.05."""
    units = torch.tensor([[0, 0, 1], [2, 3, 3], [0, 1, 1]])
    assert guard(CHANGE, units=units)[1].tolist() == [[-1, 0, -1], [-1, 0, 0], [-1, 0, 0]]
    units = torch.tensor([[0, 1, 1], [0, 0, 0], [5, 5, 5]])
    assert guard(CHANGE, units=units)[1].tolist() == [[-1, 0, 0], [0, 0, 0], [-1, 0, 0]]


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_padding_neither_decides_nor_learns(poison):
    mask = torch.tensor([[True, True, False], [True, True, False], [True, False, True]])
    old = torch.full((3, 3), -2.0)
    leaf = (old + torch.tensor(CHANGE)).masked_fill(~mask, poison).requires_grad_()
    penalty = likelihood_guard(leaf, old.masked_fill(~mask, poison), mask)
    want = torch.tensor([[0.5, 0, 0], [0, 0, 0], [0.1, 0, 0]])
    torch.testing.assert_close(penalty.detach(), want)
    loss, _ = policy_loss(leaf, None, torch.zeros(3), mask, penalty=0.3 * penalty)
    torch.testing.assert_close(loss.detach(), 0.3 * want.sum() / 6)
    (grad,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(grad, torch.tensor([[-0.05, 0, 0], [0, 0, 0], [-0.05, 0, 0]]))


def test_the_sampling_policy_gets_no_gradient():
    old = torch.full((1, 3), -2.0, requires_grad=True)
    assert not likelihood_guard(torch.full((1, 3), -3.0), old).requires_grad


def test_on_policy_there_is_nothing_to_guard():
    penalty, grad = guard([[0.0, 0.0]])
    assert penalty.abs().max() == grad.abs().max() == 0


def test_the_guard_adds_over_rows():
    whole = guard(CHANGE)[0]
    torch.testing.assert_close(torch.cat([guard(CHANGE[:1])[0], guard(CHANGE[1:])[0]]), whole)


# Rows 0 to 2 are one prompt, row 3 another with the same tokens.
TOKENS = torch.tensor([[1, 2, 3, 9], [1, 5, 3, 9], [1, 2, 7, 9], [1, 5, 7, 9]])
ADV = torch.tensor([1.0, -1.0, 0.0, -1.0])
GROUPS = [4, 4, 4, 8]
FULL = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]])


def test_shared_tokens_of_good_and_bad_answers_are_not_punished():
    weights = conflict_weights(TOKENS, ADV, GROUPS, FULL)
    # Tokens 1 and 3 are in rows 0 and 1; token 2 only in a good and a neutral one; padding's 9 counts nowhere.
    want = [[2, 1, 2, 1], [0, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert weights.tolist() == want
    assert conflict_weights(TOKENS, ADV, GROUPS, FULL, boost=1.0)[0].tolist() == [1, 1, 1, 1]


def test_positions_may_be_counted_from_the_end():
    tokens = torch.tensor([[1, 2, 3], [8, 1, 3], [2, 3, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    adv = torch.tensor([1.0, -1.0, -1.0])
    assert conflict_weights(tokens, adv, [0, 0, 0], mask, align="start").tolist() == [[1, 1, 2], [1, 1, 0], [1, 1, 1]]
    assert conflict_weights(tokens, adv, [0, 0, 0], mask, align="end").tolist() == [[1, 2, 2], [1, 1, 0], [0, 0, 1]]


def test_conflicts_follow_a_permutation_and_the_names_of_groups():
    g = torch.Generator().manual_seed(0)
    tokens, mask = torch.randint(0, 3, (12, 5), generator=g), torch.rand(12, 5, generator=g) > 0.3
    adv, groups = torch.randn(12, generator=g), torch.randint(0, 3, (12,), generator=g)
    order = torch.randperm(12, generator=g)
    whole = conflict_weights(tokens, adv, groups, mask)
    assert set(whole.unique().tolist()) == {0.0, 1.0, 2.0}
    again = conflict_weights(tokens[order], adv[order], 7 - groups[order], mask[order])
    assert torch.equal(again, whole[order])
    assert torch.equal(conflict_weights(tokens.masked_fill(~mask, 77), adv, groups, mask), whole)


def test_conflict_weights_spare_the_negative_update_alone():
    logp = torch.full((4, 4), -1.0, requires_grad=True)
    weight = conflict_weights(TOKENS, ADV, GROUPS, FULL)
    loss, _ = policy_loss(logp, None, ADV, FULL, weight=weight, reduce="sum", denom=1)
    want = [[-2, -1, -2, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    assert torch.autograd.grad(loss, logp)[0].tolist() == want


def test_rows_that_have_lost_their_confidence_are_left_out():
    entropy = torch.tensor([[0.1, 0.2, NAN], [2.0, 0.1, 0.1], [0.69, 0.69, 0.69], [NAN, NAN, NAN]])
    mask = ~entropy.isnan()
    assert confident_rows(entropy, mask).tolist() == [True, False, True, True]
    assert confident_rows(torch.tensor([[1.0, NAN]]), torch.tensor([[1, 0]])).tolist() == [False]
    assert confident_rows(entropy, mask, 0.5).tolist() == [True, False, False, True]
    assert confident_rows(entropy, mask, 0.8).tolist() == [True, True, True, True]


def test_a_bad_row_that_the_policy_has_left_is_left_out():
    """Mean falls are 0.6, 0.4, 0.6 and 0.6; the limit is 0.5, and the third row is a good one."""
    fall = torch.tensor([[0.9, 0.3, NAN], [1.2, 0.0, 0.0], [0.6, 0.6, 0.6], [2.4, -0.6, 0.0]], requires_grad=True)
    mask, adv = ~fall.isnan(), torch.tensor([-1.0, -1.0, 1.0, -0.1])
    found = stray_weights(fall, adv, mask, 0.5)
    assert found.tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert not found.requires_grad
    assert stray_weights(fall, adv, mask, 0.7).min() == 1
    assert stray_weights(fall, adv, torch.zeros(4, 3), 0.5).min() == 1
    # Of a row with advantages of both signs, the good tokens stay. An advantage of 0 is not below 0.
    each = torch.tensor([[-1.0, 2.0, 0.0]]).expand(4, 3)
    assert stray_weights(fall, each, mask, 0.5)[0].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: likelihood_guard(torch.zeros(2, 3), torch.zeros(2, 2)), r"`old_logp` \(2, 2\)"),
        (lambda: likelihood_guard(torch.zeros(2), torch.zeros(2)), r"`logp` has shape \(2,\)"),
        (lambda: conflict_weights(TOKENS, ADV, GROUPS, FULL, align="left"), "`align` is 'left'"),
        (lambda: conflict_weights(TOKENS, ADV, GROUPS, FULL, boost=0.5), "`boost` is 0.5"),
        (lambda: conflict_weights(TOKENS, ADV[:2], GROUPS, FULL), r"`adv` \(2,\)"),
        (lambda: conflict_weights(TOKENS, ADV, GROUPS[:2], FULL), "`groups` has shape"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
