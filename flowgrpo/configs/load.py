"""Reading recipes: from a file or by name, with dotted overrides, every fault named with its place and mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from .layers import Dumper, Loader, RecipeError, layers, recipe_lines
from .schema import AnyRecipe, Recipe, TextRecipe

__all__ = ["RecipeError", "dump_recipe", "load_image_recipe", "load_recipe", "recipe_names"]


def recipe_names(task: str | None = None) -> dict[str, str]:
    """Recipes that come with the package, or those of a task: name -> first comment line of the file."""
    found = recipe_lines()
    if task is None:
        return found
    return {name: line for name, line in found.items() if layers(name)[1].get("task", "images") == task}


def load_recipe(source: str | Path | None = None, overrides: Iterable[str] = ()) -> AnyRecipe:
    """Read a recipe by name (of the package) or path, and apply `key.sub=value` overrides.

    Args:
        source: a name such as `default`, or a YAML file; None is `default`. A recipe with `base: NAME` changes that
            recipe key by key; with `@published` after the source, its `published` section changes it once more, after
            that of the recipe which the section names as its own `base`. Parts for a model, a task and hardware follow
            a method after `+`, as in `flow_grpo+sd35_medium+ocr+gpus8`; they change its published settings.
        overrides: dotted assignments; values are read as YAML, list entries by number (`rewards.0.weight=2`).

    Raises:
        RecipeError: unknown recipe, unreadable file, unknown key (the nearest known one is named), wrong type,
            or impossible geometry. All faults are listed at once.
    """
    name, data = layers(str(source or "default"))
    for assignment in overrides:
        _assign(data, assignment)
    schema = _schema_of(name, data)
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise RecipeError(f"{name}:\n" + "\n".join(_explain(fault, schema) for fault in error.errors())) from None


def load_image_recipe(source: str | Path | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """As `load_recipe`, for what only works on images.

    Raises:
        RecipeError: the recipe is of another task.
    """
    recipe = load_recipe(source, overrides)
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{recipe.name} is a recipe of task {recipe.task}; this works on recipes of task images")
    return recipe


def _schema_of(name: str, data: Mapping[str, Any]) -> type[AnyRecipe]:
    task = data.get("task", "images")
    if task not in ("images", "text"):
        raise RecipeError(f"{name}:\n  task: {task!r} is neither images nor text")
    return TextRecipe if task == "text" else Recipe


def _assign(data: dict[str, Any], assignment: str) -> None:
    key, equals, raw = assignment.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {assignment!r} is not key=value; write for example run.iterations=50")
    try:
        value = yaml.load(raw, Loader)
    except yaml.YAMLError:
        raise RecipeError(f"override {assignment!r}: {raw!r} is not a YAML value; quote it") from None
    place: Any = data
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        if isinstance(place, list):
            place = place[_position(place, part, assignment)]
        else:
            # A section that is left out may be written as nothing (`ema: null`); assigning in it brings it back.
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        if not isinstance(place, dict | list):
            raise RecipeError(f"override {assignment!r}: {'.'.join(parents[: depth + 1])} is a value, not a section")
    if isinstance(place, list):
        place[_position(place, last, assignment)] = value
    else:
        place[last] = value


def _position(place: list[Any], part: str, assignment: str) -> int:
    if not part.isdigit() or int(part) >= len(place):
        raise RecipeError(f"override {assignment!r}: {part!r} is not an entry of a list of {len(place)}; count from 0")
    return int(part)


def _explain(fault: Mapping[str, Any], schema: type[BaseModel]) -> str:
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _fields_at(schema, fault["loc"][:-1])
        key = str(fault["loc"][-1])
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"  {place}: unknown key {key!r}; {hint}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if not place:
        return "\n".join(f"  {line}" for line in message.splitlines())
    given = fault.get("input")
    shown = "" if fault["type"] == "missing" or isinstance(given, dict | list) else f" (got {given!r})"
    return f"  {place}: {message}{shown}"


def _fields_at(schema: type[BaseModel], location: Iterable[Any]) -> list[str]:
    model: Any = schema
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        candidates += [inner for c in candidates for inner in getattr(c, "__args__", ())]
        # Python 3.10 takes `list[int]` for a type.
        model = next(
            c for c in candidates if get_origin(c) is None and isinstance(c, type) and issubclass(c, BaseModel)
        )
    return list(model.model_fields)


def dump_recipe(recipe: AnyRecipe) -> str:
    """A recipe as YAML, every value written out."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)
