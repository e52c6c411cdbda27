"""The smooth reward of the embedded world: known areas, known scores, and small changes for small changes."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowgrpo.rewards.registry import BUILTIN
from flowgrpo.worlds.scenes.draw import COLOURS, Thing, draw, mask
from flowgrpo.worlds.scenes.gold import Gold
from flowgrpo.worlds.scenes.paint import Paint, area_of, likeness, paint, wanted
from flowgrpo.worlds.scenes.scene_prompts import Item, compose, radius_range, split


def picture(*things: Thing) -> Tensor:
    """A drawn scene as images [1, 3, 64, 64]."""
    return torch.from_numpy(draw(things)).permute(2, 0, 1)[None]


def score(image: Tensor, *items: Item, **options: Any) -> float:
    return float(Paint(**options)(image, ["a prompt"], [[item.as_include() for item in items]]).values[0])


def test_the_area_of_a_colour_is_the_area_that_was_drawn() -> None:
    one, other = Thing("square", "red", 18, 20, 9.0), Thing("star", "blue", 44, 40, 10.0)
    areas = dict(zip(COLOURS, paint(picture(one, other))[0].tolist()))
    assert areas["red"] == pytest.approx(float(mask("square", 9.0).sum()), rel=0.03)
    assert areas["blue"] == pytest.approx(float(mask("star", 10.0).sum()), rel=0.05)
    assert sum(areas.values()) == pytest.approx(areas["red"] + areas["blue"], rel=0.06)


def test_likeness_by_hand() -> None:
    named = torch.tensor([100.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    # All that is asked for; half of it; the right amount in another colour; twice the amount.
    assert likeness(named, named, 0.0) == 1.0
    assert likeness(named / 2, named, 0.0) == pytest.approx(1 - 50 / 150)
    assert likeness(named.roll(1), named, 0.0) == 0.0
    assert likeness(named * 2, named, 0.0) == pytest.approx(1 - 100 / 300)
    # With no colour named, any colour fills it: 100 of 100, and 60 of 100.
    nothing = torch.zeros(6)
    assert likeness(named, nothing, 100.0) == 1.0
    assert likeness(named * 0.6, nothing, 100.0) == pytest.approx(1 - 40 / 160)


def test_what_a_prompt_asks_for() -> None:
    named, free = wanted([Item("circle", 2, "green"), Item("square", 1)])
    assert named[list(COLOURS).index("green")] == pytest.approx(2 * area_of("circle", 3))
    assert free == pytest.approx(area_of("square", 3))
    low, high = radius_range(3)
    assert float(mask("circle", low).sum()) < area_of("circle", 3) < float(mask("circle", high).sum())
    twice, _ = wanted([Item("circle", 2, "green"), Item("square", 1)], 2.0)
    assert torch.allclose(twice, 2 * named)


def test_it_asks_for_the_colour_of_the_prompt() -> None:
    radius = sum(radius_range(1)) / 2
    red = picture(Thing("circle", "red", 32, 32, radius))
    assert score(red, Item("circle", colour="red")) > 0.95
    assert score(red, Item("circle", colour="blue")) < 0.1
    assert score(red, Item("circle")) > 0.95
    assert score(red, Item("circle", 4, "red")) < 0.75
    # It is blind to shapes, unlike gold.
    assert score(red, Item("square", colour="red")) > 0.9


def test_a_small_change_of_a_picture_is_a_small_change_of_the_score() -> None:
    image = picture(Thing("square", "red", 32, 32, 10.0))
    asked = [Item("square", colour="red")]
    tinted = [score(image * (1 - t) + t * image.flip(1), *asked) for t in np.linspace(0, 0.2, 21)]
    steps = np.abs(np.diff(tinted))
    assert tinted[-1] < tinted[0] - 0.02
    assert steps.max() < 0.02
    assert (steps > 0).all()


def test_the_size_of_a_picture_does_not_matter() -> None:
    image = picture(Thing("square", "red", 30, 28, 9.0))
    large = image.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.allclose(paint(large), paint(image), atol=1.0)


def test_drawn_scenes_score_high_and_others_do_not() -> None:
    rng = np.random.default_rng(0)
    prompts = split(True, 10)
    right = [score(picture(*compose(p.items, rng)), *p.items) for p in prompts]
    assert np.mean(right) == pytest.approx(0.94, abs=0.015)
    assert min(right) > 0.75
    wrong = [score(picture(*compose(p.items, rng)), *q.items) for p, q in itertools.pairwise(prompts)]
    assert np.mean(wrong) < 0.7


def test_at_twice_the_amount_drawn_scenes_are_far_from_the_best() -> None:
    rng = np.random.default_rng(1)
    found = [score(picture(*compose(p.items, rng)), *p.items, amount=2.0) for p in split(True, 10)]
    # 1 − (2 − 1)/(2 + 1) for the mean scene.
    assert np.mean(found) == pytest.approx(2 / 3, abs=0.02)


def test_a_prompt_without_columns_does_not_apply() -> None:
    found = Paint()(picture().repeat(2, 1, 1, 1), ["a", "b"], [None, [Item("star").as_include()]])
    assert math.isnan(found.values[0])
    assert found.values[1] == pytest.approx(0.0, abs=1e-6)
    assert found.notes[0] == "no `include` column"
    assert math.isnan(Paint()(picture(), ["a"]).values[0])


def test_it_is_a_reward_of_the_package_beside_gold() -> None:
    assert BUILTIN["paint"] == "flowgrpo.worlds.scenes.paint:Paint"
    with pytest.raises(ValueError, match="paint: amount is 0; give a number above 0"):
        Paint(amount=0)
    with pytest.raises(ValueError, match="class"):
        Paint()(picture(), ["a"], [[{"class": "dog"}]])
    image = picture(Thing("circle", "red", 32, 32, 10.0))
    include = [[Item("circle", colour="red").as_include()]]
    assert Gold(dense=True)(image, ["a"], include).values[0] == 1.0
