"""Every number of the schema refuses what is no number for it, and names its key."""

import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.configs.schema import Recipe, TextRecipe

Key = tuple[str, ...]

# What may be below 0, or has no sign: everything else refuses -1.
SIGNED = {
    "evaluate.rewards.at_least", "evaluate.rewards.gate.at_least",
    "evaluate.rewards.gate.closed", "evaluate.rewards.weight", "rewards.at_least", "rewards.gate.at_least",
    "rewards.gate.closed", "rewards.weight", "rollout.budget.success", "schedules.end", "schedules.start",
}  # fmt: skip


def numbers(model: type[BaseModel], above: Key = ()) -> Iterator[tuple[Key, type]]:
    """Keys of numbers below a section, and whether they are whole; `[]` is an entry of a list."""
    for name, field in model.model_fields.items():
        yield from _numbers(field.annotation, (*above, name))


def _numbers(annotation: Any, key: Key) -> Iterator[tuple[Key, type]]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        annotation, origin = inner[0], typing.get_origin(inner[0])
    if origin in (typing.Union, types.UnionType):
        for part in inner:
            yield from _numbers(part, key)
    elif origin is list:
        yield from _numbers(inner[0], (*key, "[]"))
    # Python 3.10 takes `list[int]` for a type.
    elif origin is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from numbers(annotation, key)
    elif annotation in (int, float):
        yield key, annotation


KEYS = [
    (recipe, key, kind)
    for recipe, model in (("mixgrpo_flash_guard", Recipe), ("text", TextRecipe))
    for key, kind in numbers(model)
]  # fmt: skip


def override(key: Key, value: Any) -> str:
    """`section={…}` with one key in it, however deep."""
    for part in reversed(key[1:]):
        value = [value] if part == "[]" else {part: value}
    written = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
    return f"{key[0]}={written}"


def said_of(recipe: str, key: Key, value: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [override(key, value)])
    place = ".".join("0" if part == "[]" else part for part in key)
    lines = [line for line in str(caught.value).splitlines() if line.strip().startswith((f"{place}:", f"{place} "))]
    assert lines, f"{place} is not named in: {caught.value}"
    return lines[0]


@pytest.mark.parametrize(("recipe", "key", "kind"), [pytest.param(*k, id=f"{k[0]}: {'.'.join(k[1])}") for k in KEYS])
def test_a_number_refuses_what_is_none(recipe: str, key: Key, kind: type):
    for value in (float("nan"), float("inf"), float("-inf"), "3", True, [1], {"a": 1}, "2024-05-01"):
        said = said_of(recipe, key, value)
        assert "should" in said or "nan" in said or "than" in said
    if kind is int:
        assert "integer" in said_of(recipe, key, 2.5)
        assert "less than or equal" in said_of(recipe, key, 10**30)
    plain = ".".join(part for part in key if part != "[]")
    if plain not in SIGNED and "[]" not in key[-1:]:
        assert "-1" in said_of(recipe, key, -1)


def test_every_section_was_looked_through():
    assert len(KEYS) > 100
    named = {".".join(part for part in key if part != "[]") for _, key, _ in KEYS}
    assert {"optimizer.learning_rate", "sampler.steps", "optimizer.ema.decay", "rollout.budget.rounds"} <= named
    assert named >= SIGNED
