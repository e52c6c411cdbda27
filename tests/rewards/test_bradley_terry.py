"""The preference model against solutions by hand, its invariances, and its evaluation on unseen pairs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from flowgrpo.rewards.models import bradley_terry
from flowgrpo.rewards.models.bradley_terry import HeldOut, Pairs, choose_penalty, fit, loss, shorten, validate


def pairs_of(differences: Any, firsts: Any, seconds: Any = 0, ties: Any = 0, units: Any = None) -> Pairs:
    x = np.asarray(differences, dtype=float)
    x = x if x.ndim == 2 else x[:, None]
    counts = [np.broadcast_to(np.asarray(values, dtype=float), len(x)) for values in (firsts, seconds, ties)]
    return Pairs(x, *counts, np.arange(len(x)) if units is None else np.asarray(units))


def random_pairs(count: int, width: int, seed: int = 0, units: Any = None) -> Pairs:
    """Choices that follow the model, with weights 1, -1, 1, ..."""
    dice = np.random.default_rng(seed)
    x = dice.normal(size=(count, width))
    logits = x @ np.resize([1.0, -1.0], width)
    firsts = dice.random(count) < 1 / (1 + np.exp(-logits))
    return pairs_of(x, firsts, ~firsts, units=units)


def test_weights_by_hand() -> None:
    # At w = log 3 the chance is 3/4: the slope is 4 · 3/4 - 4 + penalty · log 3, and 0 for this penalty.
    always = pairs_of([1.0], 4)
    assert fit(always, 1 / math.log(3)) == pytest.approx([math.log(3)], abs=1e-12)
    # Four of five, and a difference of 2: 2 (5 · 2/3 - 4) + penalty · log(2) / 2 = 0 at w = log(2) / 2.
    mostly = pairs_of([2.0], 4, 1)
    assert fit(mostly, 8 / (3 * math.log(2))) == pytest.approx([math.log(2) / 2], abs=1e-12)
    assert loss(always, np.array([math.log(3)])) == pytest.approx(4 * math.log(4 / 3), abs=1e-12)


def test_a_tie_is_half_a_choice_for_each_side() -> None:
    mixed = pairs_of([[1.0, 0.5], [0.3, -1.0], [1.0, 1.0]], [2, 1, 0], [1, 1, 0], [0, 0, 2])
    apart = replace(
        mixed, ties=np.zeros(3), firsts=mixed.firsts + mixed.ties / 2, seconds=mixed.seconds + mixed.ties / 2
    )
    np.testing.assert_allclose(fit(mixed, 0.3), fit(apart, 0.3), rtol=0, atol=1e-14)
    assert not mixed.decided[1]
    assert not mixed.decided[2]
    assert fit(pairs_of([1.0, 2.0], 0, 0, 3), 0.1).tolist() == [0.0]


def test_the_solution_is_where_the_loss_is_least() -> None:
    pairs = random_pairs(40, 6)

    def total(w: Any) -> float:
        return loss(pairs, w) + 0.5 * 0.7 * float(w @ w)

    found = minimize(total, np.zeros(6), method="BFGS", options={"gtol": 1e-7})
    weights = fit(pairs, 0.7)
    np.testing.assert_allclose(weights, found.x, atol=1e-5)
    chance = 1 / (1 + np.exp(-pairs.differences @ weights))
    slope = pairs.differences.T @ (chance - pairs.firsts) + 0.7 * weights
    assert np.abs(slope).max() < 1e-12


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_the_start_does_not_matter_however_far(scale: float) -> None:
    pairs = random_pairs(40, 6)
    start = scale * np.random.default_rng(3).normal(size=6)
    np.testing.assert_allclose(fit(pairs, 0.2, start), fit(pairs, 0.2), atol=1e-9)
    # Where hardly anything curves, whole steps go back and forth between 1000 and -1000, and halves between thirds.
    assert fit(pairs_of([1.0], 1, 1), 1e-3, np.array([10.0 * scale])) == pytest.approx([0.0], abs=1e-9)


def test_exchanged_sides_and_rows_give_the_same_weights() -> None:
    pairs = random_pairs(30, 4)
    turned = np.arange(30) % 3 == 0
    swapped = replace(
        pairs,
        differences=np.where(turned[:, None], -pairs.differences, pairs.differences),
        firsts=np.where(turned, pairs.seconds, pairs.firsts),
        seconds=np.where(turned, pairs.firsts, pairs.seconds),
    )
    rows = np.random.default_rng(1).permutation(30)
    shuffled = Pairs(*(getattr(pairs, name)[rows] for name in ("differences", "firsts", "seconds", "ties", "units")))
    for other in (swapped, shuffled):
        np.testing.assert_allclose(fit(other, 1.0), fit(pairs, 1.0), atol=1e-12)
        assert validate(other) == validate(pairs)


def test_few_pairs_of_many_features_have_the_same_solution_in_their_span() -> None:
    wide = random_pairs(12, 40)
    short, directions = shorten(wide)
    assert (short.differences.shape, directions.shape) == ((12, 12), (40, 12))
    np.testing.assert_allclose(directions @ fit(short, 0.5), fit(wide, 0.5), atol=1e-10)
    tall = random_pairs(40, 12)
    same, identity = shorten(tall)
    assert same is tall
    assert np.array_equal(identity, np.eye(12))


def test_twice_the_same_difference_spans_nothing_more() -> None:
    x = np.repeat(np.random.default_rng(0).normal(size=(3, 20)), 2, axis=0)
    twice = pairs_of(x, [1, 1, 1, 0, 0, 1], [0, 0, 0, 1, 1, 0])
    short, directions = shorten(twice)
    np.testing.assert_allclose(directions @ fit(short, 0.5), fit(twice, 0.5), atol=1e-10)


def test_planted_weights_are_found_and_chance_is_not_taken_for_them() -> None:
    planted = validate(random_pairs(200, 4))
    assert planted.count == 200
    assert planted.right > 140
    assert planted.beats_chance
    dice = np.random.default_rng(5)
    rights = []
    for seed in range(6):
        coins = dice.random(60) < 0.5
        held_out = validate(replace(random_pairs(60, 4, seed), firsts=coins * 1.0, seconds=~coins * 1.0))
        rights.append(held_out.right)
        assert held_out.count == 60
    # 360 tosses of a coin: 5 standard deviations are 48.
    assert abs(sum(rights) - 180) < 48


def test_pairs_of_one_unit_are_held_out_together() -> None:
    dice = np.random.default_rng(0)
    x = np.repeat(dice.normal(size=(40, 80)), 2, axis=0)
    coins = np.repeat(dice.random(40) < 0.5, 2)
    remembered = pairs_of(x, coins, ~coins)
    assert validate(remembered, 0.1).right > 70
    together = replace(remembered, units=np.repeat(np.arange(40), 2))
    assert 20 < validate(together, 0.1).right < 60


def test_undecided_pairs_are_fitted_and_not_judged() -> None:
    pairs = random_pairs(30, 2)
    tied = np.arange(30) < 10
    ties = replace(pairs, firsts=pairs.firsts * ~tied, seconds=pairs.seconds * ~tied, ties=tied * 1.0)
    assert validate(ties, 1.0).count == 20
    assert not np.allclose(fit(ties, 1.0), fit(ties.take(ties.decided), 1.0))


def test_a_difference_of_nothing_is_never_right() -> None:
    blank = pairs_of(np.zeros((12, 3)), [1] * 10 + [0] * 2, 0, [0] * 10 + [1] * 2)
    found = validate(blank, 1.0)
    assert (found.right, found.count) == (0, 10)


def test_the_penalty_is_the_one_that_predicts_best_and_the_largest_of_equals() -> None:
    # Every choice follows the only feature: trust it. Coins: trust nothing.
    x = np.random.default_rng(0).normal(size=(60, 1))
    sure = pairs_of(x, x[:, 0] > 0, x[:, 0] < 0)
    assert choose_penalty(sure) == bradley_terry.PENALTIES[-1]
    coins = np.random.default_rng(1).random(60) < 0.5
    unsure = pairs_of(np.random.default_rng(2).normal(size=(60, 30)), coins, ~coins)
    assert choose_penalty(unsure) == bradley_terry.PENALTIES[0]
    assert choose_penalty(pairs_of(np.zeros((10, 2)), 1)) == bradley_terry.PENALTIES[0]
    assert list(bradley_terry.PENALTIES) == sorted(bradley_terry.PENALTIES, reverse=True)


def test_what_is_held_out_is_not_seen_by_the_choice_of_the_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = random_pairs(20, 2)
    seen: list[set[int]] = []

    def watched(rest: Pairs, folds: int) -> float:
        seen.append(set(rest.units.tolist()))
        return 1.0

    monkeypatch.setattr(bradley_terry, "choose_penalty", watched)
    assert validate(pairs) == validate(pairs, 1.0)
    assert [set(range(20)) - rest for rest in seen] == [{fold, fold + 10} for fold in range(10)]


def test_better_than_chance_is_an_interval_above_one_half() -> None:
    # Wilson's lower bounds: 0.481 and 0.531.
    assert not HeldOut(14, 20).beats_chance
    assert HeldOut(15, 20).beats_chance
    assert not HeldOut(5, 20).beats_chance
    assert HeldOut(81, 263).interval == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_pairs_that_share_pictures_are_worth_less_than_as_many_alone() -> None:
    right, counts = np.array([64.0, 0.0, 60.0, 5.0, 50.0, 55.0]), np.full(6, 64.0)
    found = HeldOut.of_units(np.arange(6), right, counts)
    assert (found.right, found.count) == (234, 384)
    assert HeldOut(234, 384).beats_chance
    assert not found.beats_chance
    # Units of one pair each are independent pairs, but for the quantile of Student.
    alone = HeldOut.of_units(np.arange(100), np.array([1.0] * 80 + [0.0] * 20), np.ones(100))
    assert alone.worth == pytest.approx(100, rel=0.05)
    assert HeldOut.of_units(np.arange(5), np.full(5, 16.0), np.full(5, 16.0)).beats_chance
    assert not HeldOut.of_units(np.zeros(2, int), np.full(2, 15.0), np.full(2, 15.0)).beats_chance
