"""CAPO: the curvature of a token's log-likelihood along its own gradient, and which tokens it rejects."""

from functools import partial

import pytest
import torch

from flowgrpo.core.categorical import own_curvature, relative_logits, token_log_probs
from flowgrpo.core.curvature import capo
from flowgrpo.core.objectives import held_columns
from flowgrpo.core.surrogates import clip


def test_the_curvature_of_two_tokens_by_hand():
    """For a token of probability p next to one of 1 - p, it is 4 p (1 - p)^3, and largest at p = 1/4."""
    p = torch.tensor([0.25, 0.5, 0.9, 1e-6])
    logits = torch.stack([p, 1 - p], 1).log()[None]
    found = own_curvature(logits, torch.zeros(1, 4, dtype=torch.long))
    torch.testing.assert_close(found[0], 4 * p * (1 - p) ** 3)
    assert found[0, 0] == pytest.approx(27 / 64)


def test_the_curvature_is_minus_the_second_derivative_along_the_gradient():
    g = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(2, 4, 7, generator=g) * 2, torch.randint(0, 7, (2, 3), generator=g)
    found = own_curvature(logits, ids, temperature=0.5)
    for row, t in ((0, 0), (0, 2), (1, 1)):
        x, y = logits[row, t].double() / 0.5, int(ids[row, t])
        u = torch.nn.functional.one_hot(torch.tensor(y), 7) - x.softmax(0)
        hessian = torch.autograd.functional.hessian(lambda z, y=y: z.log_softmax(0)[y], x)
        assert float(found[row, t]) == pytest.approx(float(-(u @ hessian @ u)), rel=1e-5)
    random = own_curvature(torch.randn(1, 5000, 9, generator=g) * 3, torch.randint(0, 9, (1, 5000), generator=g))
    assert 0 <= float(random.min()) < float(random.max()) <= 27 / 64


def test_relative_logits_are_log_probs_less_that_of_the_token():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4, 6, generator=g).requires_grad_()
    ids, others = torch.randint(0, 6, (2, 3), generator=g), torch.randint(0, 6, (2, 3, 2), generator=g)
    found = relative_logits(logits, ids, others, 0.7) + token_log_probs(logits, ids, 0.7)[..., None]
    want = (logits / 0.7).log_softmax(-1)[:, :3].gather(-1, others)
    torch.testing.assert_close(found, want)
    pull = torch.randn(2, 3, 2, generator=g)
    mine, other = (torch.autograd.grad((one * pull).sum(), logits)[0] for one in (found, want))
    torch.testing.assert_close(mine, other)


def test_tokens_of_a_large_predicted_shift_are_rejected():
    """Shifts of A^2 c / 2: 0.08, 0.32 and 0.02 nats."""
    leaf = torch.tensor([[0.1, 0.1, 0.1]]).requires_grad_()
    adv, curvature = torch.tensor([[1.0, -2.0, 1.0]]), torch.tensor([[0.16, 0.16, 0.04]])
    rejecting = partial(capo, curvature=curvature, limit=0.1, low=0.2, high=0.05)
    loss = rejecting(leaf, adv, leaf, torch.ones(1, 3))
    torch.testing.assert_close(loss.detach(), torch.tensor([[-1.05, 0.0, -1.05]]))
    held = held_columns(leaf, torch.zeros(1, 3), adv, torch.ones(1, 3), surrogate=rejecting)
    assert held.tolist() == [[True, True, True]]
    loose = partial(capo, curvature=curvature, limit=1.0)
    torch.testing.assert_close(loose(leaf, adv, leaf, None), clip(leaf, adv, leaf, None))
    (grad,) = torch.autograd.grad(partial(rejecting, high=0.2)(leaf, adv, leaf, None).sum(), leaf)
    assert (grad[0] != 0).tolist() == [True, False, True]


def test_a_limit_that_is_not_positive_is_named():
    with pytest.raises(ValueError, match="`limit` is 0"):
        capo(torch.zeros(1, 1), torch.ones(1), torch.zeros(1, 1), None, curvature=torch.zeros(1, 1), limit=0.0)
