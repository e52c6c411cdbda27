"""The gold verifier against scenes whose content is known."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage

from flowgrpo.worlds.scenes.draw import COLOURS, SHAPES, Thing, draw
from flowgrpo.worlds.scenes.gold import Found, Gold, find_things, verify
from flowgrpo.worlds.scenes.scene_prompts import SKILLS, Item, compose, disturb, ground_colour, split

Picture = NDArray[np.float32]


def accepted(picture: Picture, *items: Item) -> bool:
    return verify(find_things(picture), items)[0]


@pytest.fixture(scope="module")
def scenes() -> list[tuple[str, tuple[Item, ...], Picture]]:
    """(skill, items, picture) of every held-out prompt drawn per skill, on a ground of its own."""
    rng = np.random.default_rng(0)
    return [(p.skill, p.items, draw(compose(p.items, rng), ground_colour(rng))) for p in split(True, 50)]


def test_rendered_truth_is_accepted_and_wrong_captions_are_not(scenes: list):
    rng = np.random.default_rng(1)
    found = [find_things(picture) for _, _, picture in scenes]
    right = np.array([verify(things, items)[0] for things, (_, items, _) in zip(found, scenes)])
    wrong = np.array([verify(things, disturb(items, rng))[0] for things, (_, items, _) in zip(found, scenes)])
    assert len(scenes) >= 200
    assert right.mean() >= 0.98
    assert wrong.mean() <= 0.02
    for skill in SKILLS:
        assert right[[name == skill for name, _, _ in scenes]].mean() >= 0.95, skill


@pytest.mark.parametrize(
    "spoil",
    [
        lambda picture, rng: picture + rng.normal(0, 0.03, picture.shape),
        lambda picture, rng: ndimage.gaussian_filter(picture, (0.6, 0.6, 0)),
        lambda picture, rng: 0.92 * picture + 0.04,
    ],
    ids=["noise", "blur", "contrast"],
)
def test_verdicts_stand_noise_blur_and_less_contrast(
    scenes: list, spoil: Callable[[Picture, np.random.Generator], Picture]
):
    rng = np.random.default_rng(2)
    right, wrong = [], []
    for _, items, picture in scenes[::3]:
        things = find_things(spoil(picture, rng).clip(0, 1).astype(np.float32))
        right.append(verify(things, items)[0])
        wrong.append(verify(things, disturb(items, rng))[0])
    assert np.mean(right) >= 0.95
    assert np.mean(wrong) <= 0.03


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", COLOURS)
def test_each_thing_is_found_where_and_as_what_it_was_drawn(shape: str, colour: str):
    (thing,) = find_things(draw([Thing(shape, colour, 27, 38, 9.0)]))
    assert (thing.shape, thing.colour) == (shape, colour)
    assert thing.crisp
    # The centre of mass of a triangle lies below the centre of its patch.
    assert (thing.x, thing.y) == (pytest.approx(27, abs=0.5), pytest.approx(38, abs=2.1))


def test_ground_alone_and_specks_are_nothing():
    picture = draw([])
    assert find_things(picture) == []
    picture[10:13, 10:13] = COLOURS["red"]
    assert find_things(picture) == []
    assert verify([], [Item("star")]) == (False, 0.0, "found nothing")


TWO = [Thing("star", "red", 18, 30, 8.0), Thing("cross", "blue", 46, 30, 8.0)]
ASKED = (Item("star", colour="red"), Item("cross", colour="blue"))


def verdict(things: list[Thing], *items: Item) -> tuple[bool, float]:
    return verify(find_things(draw(things)), items)[:2]


def test_exactly_what_was_asked_is_worth_one():
    assert verdict(TWO, *ASKED) == (True, pytest.approx(1.0))
    assert verdict(TWO[::-1], *ASKED) == (True, pytest.approx(1.0))
    assert verdict(TWO, Item("cross"), Item("star")) == (True, pytest.approx(1.0))


def test_one_thing_too_many_or_too_few_fails_with_its_share():
    extra = Thing("circle", "green", 32, 54, 7.0)
    assert verdict([*TWO, extra], *ASKED) == (False, pytest.approx(2 / 3))
    assert verdict(TWO[:1], *ASKED) == (False, pytest.approx(1 / 2))
    assert verdict(TWO, *ASKED, Item("circle")) == (False, pytest.approx(2 / 3))


def test_counts_are_exact():
    stars = [Thing("star", "red", x, y, 7.0) for x, y in ((14, 14), (46, 14), (14, 46), (46, 46))]
    for count in (1, 2, 3, 4):
        for drawn in (1, 2, 3, 4):
            share = min(count, drawn) / max(count, drawn)
            assert verdict(stars[:drawn], Item("star", count, "red")) == (count == drawn, pytest.approx(share))


def test_a_swapped_colour_or_a_wrong_shape_costs_half_a_thing():
    swapped = (Item("star", colour="blue"), Item("cross", colour="red"))
    assert verdict(TWO, *swapped) == (False, pytest.approx(0.5))
    assert verdict(TWO, Item("star", colour="red"), Item("cross", colour="red")) == (False, pytest.approx(0.75))
    assert verdict(TWO, Item("star", colour="red"), Item("circle", colour="blue")) == (False, pytest.approx(0.75))
    assert verdict(TWO, Item("star"), Item("circle")) == (False, pytest.approx(0.5))


@pytest.mark.parametrize(
    ("relation", "holds", "credit"),
    [
        ("left of", True, 1.0),
        ("above", False, 0.25 + 0.5 * 2 / 3),
        ("below", False, 0.25 + 0.5 * 2 / 3),
        ("right of", False, 0.25),
    ],
)
def test_an_unmet_relation_takes_more_the_farther_it_is_from_holding(relation: str, holds: bool, credit: float):
    for items in (
        (Item("star", relation=relation, other=1), Item("cross")),
        (Item("cross"), Item("star", relation=relation, other=0)),
    ):
        assert verdict(TWO, *items) == (holds, pytest.approx(credit, abs=0.01))


def test_a_relation_that_just_fails_keeps_three_quarters_and_moving_towards_it_gains():
    credits = []
    for degrees in (180, 135, 90, 46, 44):
        x, y = 40 * math.cos(math.radians(degrees)), 40 * math.sin(math.radians(degrees))
        one, other = Found("star", "red", x, y, 90.0, 0.9), Found("cross", "blue", 0.0, 0.0, 90.0, 0.9)
        items = [Item("star", relation="right of", other=1), Item("cross")]
        credits.append(verify([one, other], items)[:2])
    assert [met for met, _ in credits] == [False] * 4 + [True]
    assert [credit for _, credit in credits] == pytest.approx([0.25, 0.25 + 1 / 6, 0.25 + 1 / 3, 0.75 - 1 / 270, 1.0])
    same = [Found("star", "red", 9.0, 9.0, 90.0, 0.9), Found("cross", "blue", 9.0, 9.0, 90.0, 0.9)]
    assert verify(same, [Item("star", relation="above", other=1), Item("cross")])[:2] == (False, 0.75)


def test_a_relation_with_a_thing_that_is_missing_counts_as_reversed():
    found = [Found("star", "red", 9.0, 9.0, 90.0, 0.9)]
    assert verify(found, [Item("star", relation="above", other=1), Item("cross")])[:2] == (False, pytest.approx(0.125))


def test_above_is_towards_the_first_row():
    stacked = [Thing("star", "red", 30, 16, 8.0), Thing("cross", "blue", 30, 46, 8.0)]
    assert verdict(stacked, Item("star", relation="above", other=1), Item("cross"))[0]
    assert not verdict(stacked, Item("star", relation="below", other=1), Item("cross"))[0]


def test_a_smudge_of_the_right_colour_is_no_shape():
    picture = draw([])
    picture[20:24, 10:50] = COLOURS["red"]
    satisfied, partial, note = verify(find_things(picture), [Item("square", colour="red")])
    assert not satisfied
    assert partial < 1.0
    assert "red" in note


def tensor(*pictures: Picture) -> torch.Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)


def include(*items: Item) -> list[dict]:
    return [item.as_include() for item in items]


def test_dense_is_one_exactly_where_strict_is(scenes: list):
    rng = np.random.default_rng(3)
    images = tensor(*(picture for _, _, picture in scenes[:40]))
    asked = [include(*(items if k % 2 else disturb(items, rng))) for k, (_, items, _) in enumerate(scenes[:40])]
    strict = Gold()(images, [""] * 40, asked)
    dense = Gold(dense=True)(images, [""] * 40, asked)
    assert strict.sub_scores == dense.sub_scores
    assert list(strict.values) == strict.sub_scores["satisfied"]
    assert list(dense.values) == dense.sub_scores["partial"]
    assert {0.0, 1.0} == set(strict.values)
    assert [value >= 1.0 - 1e-6 for value in dense.values] == [value == 1.0 for value in strict.values]
    assert all(0.0 <= value <= 1.0 for value in dense.values)
    assert any(0.0 < value < 0.99 for value in dense.values)


def test_scores_come_with_a_note_in_words_and_channels_are_first():
    scores = Gold()(tensor(draw(TWO), draw([])), ["a", "b"], [include(*ASKED)] * 2)
    assert list(scores.values) == [1.0, 0.0]
    assert set(scores.notes[0].removeprefix("found ").split(", ")) == {"red star", "blue cross"}
    assert scores.notes[1] == "found nothing"


def test_half_precision_images_with_a_graph_are_scored():
    images = tensor(draw(TWO)).bfloat16().requires_grad_()
    assert list(Gold()(images, ["a"], [include(*ASKED)]).values) == [1.0]


def test_a_prompt_without_include_is_not_applicable():
    images = tensor(draw(TWO), draw(TWO))
    mixed = Gold(dense=True)(images, ["a", "b"], [None, include(*ASKED)])
    assert math.isnan(mixed.values[0])
    assert mixed.values[1] == pytest.approx(1.0)
    assert mixed.notes[0] == "no `include` column"
    assert all(math.isnan(value) for value in Gold()(images, ["a", "b"]).values)


@pytest.mark.parametrize(
    "bad", [[{"class": "dog", "count": 1}], [], "star", [{"class": "star", "position": ["left of", 1]}]]
)
def test_an_include_of_another_world_is_an_error_not_a_zero(bad: object):
    with pytest.raises(ValueError, match="`include`"):
        Gold()(tensor(draw(TWO)), ["a"], [bad])


def test_as_many_includes_as_images():
    with pytest.raises(ValueError, match="argument"):
        Gold()(tensor(draw(TWO), draw(TWO)), ["a", "b"], [include(*ASKED)])


def test_videos_are_refused_in_words():
    with pytest.raises(ValueError, match=r"gold: images have shape \[1, 5, 3, 64, 64\]; give single images"):
        Gold()(torch.zeros(1, 5, 3, 64, 64), ["a"], [include(*ASKED)])
