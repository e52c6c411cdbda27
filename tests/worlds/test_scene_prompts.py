"""Prompts of the embedded world: wording, split, the columns they travel as, and scenes that satisfy them."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowgrpo.worlds.scenes.draw import COLOURS, GROUND, SHAPES, SIZE, Thing
from flowgrpo.worlds.scenes.scene_prompts import (
    FRAMES,
    FRESH_FRAMES,
    NUMBERS,
    OPPOSITE,
    RELATIONS,
    SKILLS,
    Item,
    ScenePrompt,
    all_prompts,
    compose,
    disturb,
    ground_colour,
    is_heldout,
    meaning,
    read_items,
    shipped,
    split,
    styled,
    write_prompt_files,
)

WORLD = all_prompts()


def test_the_world_names_each_prompt_once_in_six_skills():
    assert len({prompt.text for prompt in WORLD}) == len(WORLD)
    assert {prompt.skill for prompt in WORLD} == set(SKILLS)
    assert len(SKILLS) == 6
    # Each skill's combinations, in 8 frames.
    pairs, inks = 5 * 4, 6 * 5
    assert Counter(prompt.skill for prompt in WORLD) == {
        "single_object": 8 * 5,
        "two_object": 8 * pairs,
        "counting": 8 * 5 * 3 * 7,
        "colors": 8 * 5 * 6,
        "position": 8 * pairs * 4,
        "color_attr": 8 * pairs * inks,
    }


def test_prompts_are_short_and_speak_of_what_they_ask():
    for prompt in WORLD:
        words = prompt.text.split()
        assert len(words) <= 10
        assert not {("a", "orange"), ("an", "red")} & set(itertools.pairwise(words))
        for item in prompt.items:
            plural = "" if item.count == 1 else "es" if item.shape == "cross" else "s"
            assert item.shape + plural in words
            assert item.count == 1 or NUMBERS[item.count] in words
            assert item.colour is None or item.colour in words
            assert item.relation is None or item.relation in prompt.text


def test_train_and_heldout_are_disjoint_and_whole():
    train, heldout = split(False), split(True)
    texts, others = {prompt.text for prompt in train}, {prompt.text for prompt in heldout}
    assert not texts & others
    assert texts | others == {prompt.text for prompt in WORLD}
    assert 0.22 < len(others) / len(WORLD) < 0.28


def test_the_split_is_by_words_alone():
    assert all(is_heldout(prompt.text) for prompt in split(True, 20, seed=5))
    assert not any(is_heldout(prompt.text) for prompt in split(False, 20, seed=5))


def test_a_split_is_limited_per_skill_and_drawn_by_its_seed():
    few = split(True, 10)
    assert max(Counter(prompt.skill for prompt in few).values()) == 10
    assert [prompt.skill for prompt in few[:6]] == list(SKILLS)
    assert split(True, 10) == few
    assert split(True, 10, seed=1) != few


def test_the_shipped_files_are_what_the_code_writes(tmp_path: Path):
    write_prompt_files(tmp_path)
    folder = resources.files("flowgrpo.worlds.scenes") / "data"
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in tmp_path.iterdir())
    records: dict[str, list[dict[str, Any]]] = {}
    for name in ("train", "heldout", "test"):
        text = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8")
        assert (folder / f"{name}.jsonl").read_text(encoding="utf-8") == text
        records[name] = [json.loads(line) for line in text.splitlines()]
    assert {name: len(rows) for name, rows in records.items()} == {"train": 1069, "heldout": 301, "test": 301}
    styles: dict[str, list[dict[str, Any]]] = {}
    for name in ("style", "style_heldout"):
        text = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8")
        assert (folder / f"{name}.jsonl").read_text(encoding="utf-8") == text
        styles[name] = [json.loads(line) for line in text.splitlines()]
    assert {name: len(rows) for name, rows in styles.items()} == {"style": 467, "style_heldout": 162}
    assert len({record["prompt"] for rows in styles.values() for record in rows}) == 467 + 162
    texts = {record["prompt"] for rows in records.values() for record in rows}
    assert len(texts) == 1069 + 301 + 301
    assert all({record["tag"] for record in rows} == set(SKILLS) for rows in records.values())
    known = {prompt.text: prompt for prompt in [*WORLD, *all_prompts(FRESH_FRAMES)]}
    for record in [*records["heldout"], *records["test"]]:
        assert read_items(record["include"]) == known[record["prompt"]].items


def test_a_style_is_said_in_a_column_alone():
    """The detailed prompt is a wording of the world, or one of it with colours, and asks for what `include` has."""
    train, held = styled(heldout=False), styled(heldout=True)
    known = {prompt.text: prompt.items for prompt in WORLD}
    for record in (*train, *held):
        items = known[record["prompt"]]
        assert {item.colour for item in items} == {None}
        assert read_items(record["include"]) == tuple(replace(item, colour="red") for item in items)
        assert record["detailed"].replace(" red", "") == record["prompt"]
        assert record["detailed"].count(" red") + record["detailed"].startswith("red") == len(items)
    scenes = [{meaning(read_items(record["include"])) for record in rows} for rows in (train, held)]
    assert len(scenes[1]) > 20
    orange = styled(heldout=False, colour="orange")
    assert orange[0]["detailed"].replace("an orange ", "a ").replace("orange ", "") == orange[0]["prompt"]


def test_test_prompts_ask_for_what_no_choice_was_made_on():
    sets = shipped()
    scenes = {
        name: {s: {meaning(p.items) for p in rows if p.skill == s} for s in SKILLS} for name, rows in sets.items()
    }
    for skill in ("counting", "position", "color_attr"):
        assert not scenes["test"][skill] & scenes["heldout"][skill]
    assert not scenes["test"]["color_attr"] & scenes["train"]["color_attr"]
    # The other skills have 5 + 10 + 30 scenes, and training prompts ask for each of them: only the words can be new.
    rest = ("single_object", "two_object", "colors")
    assert [len(scenes["train"][skill]) for skill in rest] == [5, 10, 30]
    frames = {frame.format("") for frame in FRESH_FRAMES}
    assert not set(FRESH_FRAMES) & set(FRAMES)
    for prompt in sets["test"]:
        assert (prompt.skill in rest) == any(prompt.text.startswith(frame) for frame in frames)


def test_test_prompts_are_made_up_like_the_heldout_ones():
    def share(rows: list[ScenePrompt], *words: str) -> float:
        return sum(word in prompt.text for prompt in rows for word in words) / len(rows)

    sets = shipped()
    kinds = {name: Counter((p.skill, p.items[0].count) for p in rows) for name, rows in sets.items()}
    assert kinds["test"] == kinds["heldout"]
    test, heldout = sets["test"], sets["heldout"]
    assert [p.skill for p in test] == [p.skill for p in heldout]
    words = [sum(len(p.text.split()) for p in rows) / len(rows) for rows in (test, heldout)]
    assert words[0] == pytest.approx(words[1], abs=0.25)
    for name in (*SHAPES, *COLOURS):
        assert share(test, name) == pytest.approx(share(heldout, name), abs=0.1)


def test_each_seed_makes_its_own_disjoint_sets():
    assert shipped() == shipped(0)
    others = shipped(1)
    assert all(others[name] != rows for name, rows in shipped().items())
    assert sum(len({p.text for p in rows}) for rows in others.values()) == len(
        {p.text for rows in others.values() for p in rows}
    )


def test_the_models_know_the_words_of_new_frames():
    assert {w for p in all_prompts(FRESH_FRAMES) for w in p.text.split()} <= {w for p in WORLD for w in p.text.split()}


def test_items_travel_as_genevals_columns():
    items = (Item("star", colour="red", relation="left of", other=1), Item("cross", count=2))
    record = ScenePrompt("words", "position", items).as_record()
    assert record == {
        "prompt": "words",
        "tag": "position",
        "include": [
            {"class": "star", "count": 1, "color": "red", "position": ["left of", 1]},
            {"class": "cross", "count": 2},
        ],
    }
    assert read_items(json.loads(json.dumps(record))["include"]) == items
    assert Item.from_include({"class": "star"}) == Item("star")


@pytest.mark.parametrize(
    ("include", "part"),
    [
        ([{"class": "bench", "count": 1}], "class 'bench'; write one of circle"),
        ([{"count": 1}], "class None"),
        ([{"class": "star", "color": "pink"}], "color 'pink'"),
        ([{"class": "star", "count": 0}], "count 0"),
        ([{"class": "star", "count": "two"}], "count 'two'"),
        ([{"class": "star", "position": ["near", 1]}, {"class": "cross"}], "position 'near'"),
        ([{"class": "star", "position": "left of"}, {"class": "cross"}], "position 'left of'"),
        ([{"class": "star", "position": ["left of", 2]}, {"class": "cross"}], "relative to item 2"),
        ([{"class": "star", "position": ["left of", -1]}, {"class": "cross"}], "relative to item -1"),
        ([{"class": "star", "position": ["left of", 0]}, {"class": "cross"}], "places item 0 relative to item 0"),
        (["star"], "lists 'star'"),
        ([], "at least one item"),
        ('[{"class": "star"}]', ".jsonl"),
    ],
)
def test_an_include_this_world_does_not_know_is_refused(include: Any, part: str):
    with pytest.raises(ValueError, match=r"`include`") as caught:
        read_items(include)
    assert part in str(caught.value)


def shown(things: list[Thing], items: tuple[Item, ...]) -> bool:
    """Whether things, placed in the order of the items, are what the items ask for."""
    wanted = [item for item in items for _ in range(item.count)]
    named = len(things) == len(wanted) and all(
        thing.shape == item.shape and item.colour in (None, thing.colour) for thing, item in zip(things, wanted)
    )
    related = True
    for item, thing in zip(items, things):
        if item.relation is not None:
            other = things[item.other]
            dx, dy = thing.x - other.x, thing.y - other.y
            side = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[item.relation]
            related = related and side > max(abs(dx), abs(dy)) - 1e-9
    return named and related


def test_composed_scenes_show_exactly_what_was_asked_within_the_picture():
    rng = np.random.default_rng(0)
    for prompt in split(False, 60):
        things = compose(prompt.items, rng)
        assert shown(things, prompt.items)
        for thing in things:
            assert 1.3 * thing.radius <= min(thing.x, thing.y, SIZE - 1 - thing.x, SIZE - 1 - thing.y)
        for one, two in itertools.combinations(things, 2):
            assert max(abs(one.x - two.x), abs(one.y - two.y)) > 1.1 * (one.radius + two.radius)


def test_what_a_prompt_leaves_open_varies():
    rng = np.random.default_rng(0)
    things = [compose((Item("star"),), rng)[0] for _ in range(60)]
    assert {thing.colour for thing in things} == set(COLOURS)
    assert len({(thing.x, thing.y) for thing in things}) > 50
    assert len({thing.radius for thing in things}) > 3


def test_a_scene_is_its_generators():
    items = (Item("star", relation="above", other=1), Item("cross"))
    assert compose(items, np.random.default_rng(3)) == compose(items, np.random.default_rng(3))
    assert compose(items, np.random.default_rng(3)) != compose(items, np.random.default_rng(4))


def test_an_impossible_scene_says_so():
    with pytest.raises(RuntimeError, match="no room"):
        compose((Item("star", count=20),), np.random.default_rng(0))


def test_a_disturbed_caption_changes_one_thing_of_one_item():
    rng = np.random.default_rng(0)
    kinds = Counter()
    for prompt in split(False, 60):
        changed = disturb(prompt.items, rng)
        assert len(changed) == len(prompt.items)
        differing = [(a, b) for a, b in zip(prompt.items, changed) if a != b]
        assert len(differing) == 1
        before, after = (vars(item) for item in differing[0])
        (field,) = [name for name in before if before[name] != after[name]]
        kinds[field] += 1
        assert len({item.shape for item in changed}) == len(changed)
        assert after["shape"] in SHAPES
    assert set(kinds) == {"shape", "count", "colour", "relation"}


def test_each_relation_has_its_opposite():
    assert all(OPPOSITE[OPPOSITE[relation]] == relation != OPPOSITE[relation] for relation in RELATIONS)
    assert set(OPPOSITE) == set(RELATIONS)


def test_grounds_are_light_and_near_the_standard_one():
    rng = np.random.default_rng(0)
    grounds = np.array([ground_colour(rng) for _ in range(200)])
    assert np.abs(grounds - GROUND).max() <= 0.042 + 1e-9
    assert grounds.std(0).min() > 0.01
    assert grounds.max() <= 1.0
