"""Which prompts of a file are evaluated, if not all."""

import json
from pathlib import Path

import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.checking import check
from flowgrpo.training.prompts.chosen_prompts import places_of
from flowgrpo.training.recipe_prompts import read_split


@pytest.mark.parametrize(("count", "most"), [(301, 100), (301, 300), (7, 5), (2212, 512), (5, 1)])
def test_one_prompt_of_each_stretch_is_taken(count: int, most: int) -> None:
    taken = places_of(count, most, "spread")
    assert len(taken) == most
    for k, place in enumerate(taken):
        assert k * count // most <= place < (k + 1) * count // most
    assert taken == places_of(count, most, "spread")


@pytest.mark.parametrize("take", ["spread", "first"])
def test_all_are_taken_if_there_are_no_more(take: str) -> None:
    assert places_of(4, None, take) == places_of(4, 4, take) == places_of(4, 9, take) == [0, 1, 2, 3]
    assert places_of(0, 9, take) == places_of(4, 0, take) == []


def test_the_first_ones() -> None:
    assert places_of(9, 3, "first") == [0, 1, 2]


def test_categories_that_take_turns_are_all_taken() -> None:
    """Every sixth prompt would have one category only."""
    taken = [place % 6 for place in places_of(300, 50, "spread")]
    assert set(taken) == set(range(6))
    assert max(taken.count(category) for category in range(6)) < 20


def test_a_sorted_file_is_evaluated_from_its_first_prompts_to_its_last(tmp_path: Path) -> None:
    lines = [{"prompt": f"{kind} {k}", "kind": kind} for kind in ("easy", "middle", "hard") for k in range(20)]
    path = tmp_path / "sorted.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [f"data.heldout={path}", "evaluate.prompts=6"]
    recipe = load_recipe("mixgrpo", words)
    data = check(recipe).data
    assert data is not None
    kinds = [row.text.partition(" ")[0] for row in data.heldout]
    assert kinds == ["easy"] * 2 + ["middle"] * 2 + ["hard"] * 2
    assert [row.id for row in read_split(recipe, "heldout")] == [row.id for row in data.heldout]
    first = read_split(load_recipe("mixgrpo", [*words, "evaluate.take=first"]), "heldout")
    assert [row.text for row in first] == [f"easy {k}" for k in range(6)]
