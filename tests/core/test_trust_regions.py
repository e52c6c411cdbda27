"""Trust regions with a pull to their border, or of a token's probability: values and gradients worked out by hand."""

import math
from functools import partial

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.objectives import policy_loss
from flowgrpo.core.surrogates import held_back
from flowgrpo.core.trust_regions import cppo, dppo, spo

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


@pytest.mark.parametrize("adv", [2.0, -2.0])
def test_dppo_leaves_a_token_out_only_where_it_would_move_further_out(adv):
    """At q = 0.5 the bounds 0.1 and 0.2 of the probability are ratios of 0.8 and 1.4."""
    surrogate = partial(dppo, low=0.1, high=0.2)
    ratios = torch.tensor([0.5, 0.79, 0.81, 1.39, 1.41, 1.9], dtype=torch.float64)
    value, grad = evaluate(surrogate, ratios, adv)
    kept = torch.tensor([1, 1, 1, 1, 0, 0] if adv > 0 else [0, 0, 1, 1, 1, 1])
    close(grad, -adv * ratios * kept)
    close(value, -adv * ratios * (0.5 * ratios).log() * kept)


def test_dppo_gives_a_rare_token_room_and_bounds_its_weight():
    """From q = 0.001 a token may reach p = 0.15, a ratio of 150; at q = 0.9 a ratio of 0.8 is too far."""
    assert evaluate(partial(dppo, most=math.inf), [149.0, 152.0], 1.0, 0.001)[1].tolist() == pytest.approx([-149.0, 0])
    close(evaluate(dppo, [149.0, 10.1, 9.9], 1.0, 0.001)[1], [-10.0, -10.0, -9.9])
    assert evaluate(dppo, [0.84, 0.82], -1.0, 0.9)[1].tolist() == pytest.approx([0.84, 0])
    assert evaluate(dppo, [3000.0], -1.0, 1e-9)[1].tolist() == pytest.approx([10.0])


@pytest.mark.parametrize("prior", [0.5, 0.05])
def test_the_kl_of_dppo_is_the_kl_of_two_outcomes(prior):
    """The bound is put just above and just below the KL of (q, 1 - q) from (p, 1 - p)."""
    for ratio, adv in ((1.3, 1.0), (0.6, -1.0)):
        p = prior * ratio
        kl = prior * math.log(prior / p) + (1 - prior) * math.log((1 - prior) / (1 - p))
        for bound, grad in ((kl * 1.0001, -adv * ratio), (kl * 0.9999, 0.0)):
            surrogate = partial(dppo, low=bound, high=bound, divergence="kl")
            close(evaluate(surrogate, [ratio], adv, prior)[1], [grad])
        # The other way is back to where the policy was.
        close(evaluate(partial(dppo, low=0.0, high=0.0, divergence="kl"), [ratio], -adv, prior)[1], [adv * ratio])


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_holds_certain_tokens_too(divergence):
    """In float32, a probability of 1 leaves nothing for the other tokens, and a ratio may be infinite."""
    logp = torch.tensor([[0.0, -1e-9, 0.0, -20.0]])
    log_ratio = torch.tensor([[1e-7, 0.0, 200.0, -20.0]])
    mask = torch.ones(1, 4)
    assert held_back(partial(dppo, divergence=divergence), log_ratio, torch.ones(1), logp, mask).tolist() == [
        [False, False, True, False]
    ]
    assert held_back(partial(dppo, divergence=divergence), log_ratio, -torch.ones(1), logp, mask).tolist() == [
        [False, False, False, True]
    ]
    assert dppo(log_ratio, torch.ones(1), logp - 0.1, mask, divergence=divergence, most=math.inf).isfinite().all()


def answer(moves, prior=0.5, adv=1.0, mask=None, **options):
    """Which tokens of one answer CPPO leaves out; `moves` are those of their probabilities, from `prior`."""
    new = prior + torch.tensor([moves], dtype=torch.float64)
    log_ratio, mask = (new / prior).log(), torch.ones(1, len(moves)) if mask is None else torch.tensor([mask])
    held = held_back(partial(cppo, **options), log_ratio, torch.tensor([adv]), new.log(), mask)
    return held[0].int().tolist()


def test_cppo_takes_the_moves_of_earlier_tokens_from_the_budget():
    """With equal weights, three moves of 0.1 at a budget of 0.02 to 0.04.

    b is bounded to 0.04. Before the third token b W - S = 2 x (0.04 - 0.1) = -0.12, so 0.1 > 0.2 - 0.12. Before the
    second token it is -0.06, and 0.1 < 0.14.
    """
    assert answer([0.1, 0.1, 0.1], last=1.0) == [0, 0, 1]
    assert answer([-0.1, -0.1, -0.1], last=1.0) == [0, 0, 0]  # back to where the policy was
    assert answer([-0.1, -0.1, -0.1], last=1.0, adv=-1.0) == [0, 0, 1]
    # Moves of the other sign use up the budget too, and none of it is left out.
    assert answer([-0.1, -0.1, 0.1], last=1.0) == [0, 0, 1]
    assert answer([0.1, 0.1, 0.1], last=1.0, budget=0.1) == [0, 0, 0]
    # What was not used gives a token no more than the bound.
    assert answer([0.0, 0.0, 0.0, 0.21, 0.0], last=1.0) == [0, 0, 0, 1, 0]
    assert answer([0.0, 0.0, 0.0, 0.19, 0.0], last=1.0) == [0, 0, 0, 0, 0]


def test_cppo_weighs_a_later_move_less():
    """Weights are 1, 0.9 and 0.8. The last move of 0.24 counts as 0.192, and the first one of 0.21 as it is."""
    assert answer([0.0, 0.0, 0.24]) == [0, 0, 0]
    assert answer([0.0, 0.0, 0.26]) == [0, 0, 1]
    assert answer([0.21, 0.0, 0.0]) == [1, 0, 0]
    assert answer([0.0, 0.22, 0.0]) == [0, 0, 0]
    assert answer([0.0, 0.23, 0.0]) == [0, 1, 0]


def test_cppo_takes_the_usual_move_of_the_answer_within_bounds():
    """Of eleven moves the 0.9 quantile is the second largest, and here the last; ten tokens are before it."""

    def last_of(first, last, bound):
        return answer([first, *[0.0] * 9, last], last=1.0, bound=bound)[-1]

    assert last_of(0.33, 0.03, bound=0.055)  # 0.03 > 0.055 + 0.30 - 0.33
    assert not last_of(0.33, 0.035, bound=0.055)  # 0.035 < 0.055, for 0.35 > 0.33
    assert not last_of(0.23, 0.01, bound=0.045)  # at least 0.02: 0.01 < 0.045 + 0.20 - 0.23
    assert last_of(0.45, 0.05, bound=0.09)  # at most 0.04: 0.05 > 0.09 + 0.40 - 0.45


def test_cppo_counts_only_tokens_of_the_mask():
    """What a tool wrote between the tokens neither spends nor earns, and has no place in the row."""
    moves, mask = [0.1, 0.5, 0.1, 0.4, 0.1], [True, False, True, False, True]
    moved = [move for move, kept in zip(moves, mask) if kept]
    held = answer(moves, prior=0.3, mask=mask, last=0.5)
    assert [one for one, kept in zip(held, mask) if kept] == answer(moved, prior=0.3, last=0.5) == [0, 0, 0]
    held = answer(moves, prior=0.3, mask=mask, last=1.0)
    assert [one for one, kept in zip(held, mask) if kept] == answer(moved, prior=0.3, last=1.0) == [0, 0, 1]
    assert answer([0.1], mask=[False]) == [0]


def test_cppo_is_the_plain_ratio_where_nothing_is_left_out():
    value, grad = evaluate(partial(cppo, bound=10.0, budget=10.0), RATIOS, -2.0)
    close(grad, 2 * RATIOS)
    close(value, 2 * RATIOS * (0.5 * RATIOS).log())


@pytest.mark.parametrize(
    ("recipe", "lines", "words"),
    [
        ("mixgrpo", ["objective.surrogate={name: spo, by: probability}"],
         "spo with by: probability compares the probabilities of single tokens, and task is images; use another"),
        ("masked", ["objective.surrogate={name: spo, by: probability}"], "single tokens, and task is masked"),
        ("mixgrpo", ["objective.surrogate=dppo"], "surrogate dppo compares .* tokens, and task is images; use another"),
        ("text", ["objective={surrogate: cppo, level: part}", "parts={cut: lines}"],
         "surrogate cppo compares .* tokens, and objective.level is part; use objective.level token"),
        ("text", ["objective.surrogate={name: spo, by: probability}", "objective.level=sequence"],
         "single tokens, and objective.level is sequence; use objective.level token"),
    ],
)  # fmt: skip
def test_a_probability_of_more_than_a_token_is_refused(recipe, lines, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe, lines)


@pytest.mark.parametrize(
    ("surrogate", "words"),
    [
        (partial(spo, epsilon=0.0), r"`epsilon` is 0.0; use a positive distance of the border, such as 0\.2"),
        (partial(dppo, low=-0.1), "low=-0.1, high=0.15, most=10.0; use low, high >= 0 and most > 0"),
        (partial(dppo, high=-0.1), "high=-0.1"),
        (partial(dppo, most=0.0), "most=0.0"),
        (partial(cppo, bound=0.0), "bound=0.0, last=0.8, budget=0.02; use bound, budget > 0 and 0 < last <= 1"),
        (partial(cppo, budget=0.0), "budget=0.0"),
        (partial(cppo, last=0.0), "last=0.0"),
        (partial(cppo, last=1.1), "last=1.1"),
    ],
)
def test_impossible_regions_are_refused(surrogate, words):
    with pytest.raises(ValueError, match=words):
        evaluate(surrogate, [1.0], 1.0)
