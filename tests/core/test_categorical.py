"""Tokens drawn from logits, and their log-probs with gradients: worked out by hand, whole and in pieces."""

import math

import pytest
import torch

from flowgrpo.core import categorical
from flowgrpo.core.categorical import pick, tempered, token_log_probs

SHARES = torch.tensor([0.5, 0.0, 0.3, 0.2])


@pytest.mark.parametrize(("number", "token"), [(0.0, 0), (0.499, 0), (0.501, 2), (0.799, 2), (0.801, 3), (0.999999, 3)])
def test_a_number_picks_the_token_whose_share_it_falls_into(number: float, token: int) -> None:
    """The shares end at .5, .5, .8 and 1; the second token has none, and is never picked."""
    found, chance = pick(SHARES.log()[None] + 3.0, torch.tensor([number], dtype=torch.float64))
    assert found.tolist() == [token]
    assert chance.tolist() == pytest.approx([math.log(SHARES[token])], abs=1e-6)


def test_the_border_belongs_to_the_next_token() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf, 0.0, -torch.inf]])
    found, chance = pick(logits, torch.tensor([0.5, 0.0], dtype=torch.float64))
    assert found.tolist() == [2, 1]
    assert chance.tolist() == pytest.approx([math.log(0.5), 0.0])


def test_a_temperature_of_one_copies_nothing() -> None:
    logits = torch.tensor([2.0, 4.0])
    assert tempered(logits, 1.0) is logits
    assert tempered(logits, 2.0).tolist() == [1.0, 2.0]


def test_log_probs_and_their_gradient() -> None:
    """At temperature 2 the shares are 1/4 and 3/4; the gradient is (onehot - share) / 2, and 0 after the last token."""
    logits = torch.tensor([[[0.0, 2 * math.log(3)], [5.0, 5.0]]], requires_grad=True)
    found = token_log_probs(logits, torch.tensor([[1]]), 2.0)
    assert found.tolist() == [[pytest.approx(math.log(0.75))]]
    (3.0 * found).sum().backward()
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([-0.375, 0.375, 0.0, 0.0])


@pytest.mark.parametrize("numbers", [1, 7, 12, 30, 1000])
def test_pieces_give_what_the_whole_gives(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5, 6, generator=generator, dtype=torch.float64).float().requires_grad_()
    ids = torch.randint(6, (4, 4), generator=generator)
    weight = torch.randn(4, 4, generator=generator)
    monkeypatch.setattr(categorical, "NUMBERS", numbers)
    found = token_log_probs(logits, ids, 0.7)
    (mine,) = torch.autograd.grad((found * weight).sum(), logits)
    plain = (logits[:, :4] / 0.7).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    (expected,) = torch.autograd.grad((plain * weight).sum(), logits)
    assert torch.allclose(found, plain, atol=1e-6)
    assert torch.allclose(mine, expected, atol=1e-6)
