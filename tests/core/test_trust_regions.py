"""Trust regions with a pull to their border, or of a token's probability: values and gradients worked out by hand."""

import math
from functools import partial

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.objectives import policy_loss
from flowgrpo.core.surrogates import held_back
from flowgrpo.core.trust_regions import spo

RATIOS = torch.tensor([0.5, 0.9, 1.1, 1.5], dtype=torch.float64)


def evaluate(surrogate, ratios, adv, prior=0.5):
    """Values, and gradients by the log-prob, of tokens whose old probability is `prior`."""
    shift = torch.zeros(len(ratios), 1, dtype=torch.float64, requires_grad=True)
    log_ratio = torch.as_tensor(ratios, dtype=torch.float64).log()[:, None] + shift
    adv = torch.full((len(ratios),), adv, dtype=torch.float64)
    loss = surrogate(log_ratio, adv, log_ratio + math.log(prior), torch.ones_like(log_ratio).bool())
    return loss.detach()[:, 0], torch.autograd.grad(loss.sum(), shift)[0][:, 0]


def close(got, want, tol=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), atol=tol, rtol=tol)


@pytest.mark.parametrize("adv", [2.0, -2.0])
def test_spo_weighs_the_gradient_by_the_distance_from_its_border(adv):
    value, grad = evaluate(partial(spo, epsilon=0.4), RATIOS, adv)
    close(value, -adv * RATIOS + 2 / 0.8 * (RATIOS - 1) ** 2)
    weight = 1 - math.copysign(1, adv) * (RATIOS - 1) / 0.4
    close(grad, -adv * weight * RATIOS)


def test_spo_turns_round_beyond_its_border_and_does_not_stop_there():
    """For a good sample the loss falls up to r = 1.2 and rises after it; for a bad one the border is at r = 0.8."""
    ratios = [0.7, 0.79, 0.81, 1.19, 1.21, 1.3]
    assert evaluate(spo, ratios, 1.0)[1].sign().tolist() == [-1, -1, -1, -1, 1, 1]
    assert evaluate(spo, ratios, -1.0)[1].sign().tolist() == [-1, -1, 1, 1, 1, 1]
    close(evaluate(spo, [1.2], 1.0)[1], [0.0])
    close(evaluate(spo, [0.8], -1.0)[1], [0.0])
    log_ratio = torch.tensor([ratios]).log()
    assert not held_back(spo, log_ratio, torch.ones(1), log_ratio, torch.ones(1, 6)).any()


@pytest.mark.parametrize("prior", [0.5, 0.02])
def test_drpo_has_its_border_where_the_probability_has_moved(prior):
    """For a good token the border is at p = q + 0.1: a ratio of 1.2 at q = 0.5, and of 6 at q = 0.02."""
    drpo = partial(spo, epsilon=0.1, by="probability")
    border = 1 + 0.1 / prior
    value, grad = evaluate(drpo, [border, 1.0, 1.0 + 2 * (border - 1)], 3.0, prior)
    close(grad, [0.0, -3.0, 3.0 * (2 * border - 1)])
    close(value[0], -3 * border + 3 * prior / 0.2 * (border - 1) ** 2)


def test_the_old_probability_of_drpo_is_no_way_to_lower_its_loss():
    """q follows from two numbers that both move with the weights; moved together they must leave the pull alone."""
    logp = torch.tensor([[math.log(0.6)]], dtype=torch.float64, requires_grad=True)
    log_ratio = torch.tensor([[math.log(1.5)]], dtype=torch.float64)
    loss = spo(log_ratio, torch.ones(1, dtype=torch.float64), logp, torch.ones(1, 1), epsilon=0.1, by="probability")
    assert not loss.requires_grad
    close(loss, [[-1.5 + 0.4 / 0.2 * 0.25]])


def test_published_drpo_never_turns_round():
    """No probability moves by 12.5. The weight of the gradient is between 0.92 and 1.08."""
    published = partial(spo, epsilon=12.5, by="probability")
    close(evaluate(published, [1e4], 1.0, prior=1e-4)[1] / 1e4, [-(1 - (1 - 1e-4) / 12.5)])
    close(evaluate(published, [1e-4], 1.0, prior=1.0)[1] / 1e-4, [-(1 + (1 - 1e-4) / 12.5)])


def test_spo_neither_overflows_nor_loses_a_small_step():
    log_ratio = torch.tensor([[800.0, -800.0]], requires_grad=True)
    for by in ("ratio", "probability"):
        loss = spo(log_ratio, torch.tensor([-1.0]), log_ratio - 900, torch.ones(1, 2), by=by)
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), log_ratio)[0].isfinite().all()
    small = torch.tensor([[1e-5]], requires_grad=True)
    loss = spo(small, torch.ones(1), small, torch.ones(1, 1), epsilon=2e-5)
    assert torch.autograd.grad(loss.sum(), small)[0].item() == pytest.approx(-0.5, rel=1e-4)


def test_spo_of_a_whole_answer_has_the_ratio_of_the_answer():
    logp = torch.tensor([[-1.0, -0.4, -2.0]], dtype=torch.float64, requires_grad=True)
    old = logp.detach() - torch.tensor([[0.3, -0.1, 0.4]], dtype=torch.float64)
    loss, _ = policy_loss(logp, old, torch.tensor([1.0]), surrogate=spo, level="sequence", reduce="sequence")
    ratio = math.exp(0.2)
    assert loss.item() == pytest.approx(-ratio + 2.5 * (ratio - 1) ** 2)
    close(torch.autograd.grad(loss, logp)[0], [[-ratio * (1 - (ratio - 1) / 0.2) / 3] * 3])


@pytest.mark.parametrize(
    ("recipe", "lines", "words"),
    [
        ("mixgrpo", ["objective.surrogate={name: spo, by: probability}"],
         "spo with by: probability compares the probabilities of single tokens, and task is images; use another"),
        ("masked", ["objective.surrogate={name: spo, by: probability}"], "single tokens, and task is masked"),
        ("text", ["objective.surrogate={name: spo, by: probability}", "objective.level=sequence"],
         "single tokens, and objective.level is sequence; use objective.level token"),
    ],
)  # fmt: skip
def test_a_probability_of_more_than_a_token_is_refused(recipe, lines, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe, lines)


@pytest.mark.parametrize("surrogate", [partial(spo, epsilon=0.0), partial(spo, epsilon=-1.0)])
def test_a_border_at_no_distance_is_refused(surrogate):
    with pytest.raises(ValueError, match=r"`epsilon` is .*; use a positive distance of the border, such as 0\.2"):
        evaluate(surrogate, [1.0], 1.0)
