"""Reading recipes from a file or by name, with dotted overrides. A message gives place and remedy of every fault."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

import yaml
from pydantic import ValidationError

from ..parts.choice import Of, plain
from ..parts.kinds import KINDS
from ..parts.plugins import with_article
from .explaining import explain
from .layers import RecipeError, layers, merge, over, own_files, recipe_names, refuse_idle_lora
from .schema import SCHEMAS, AnyRecipe, Recipe
from .sections import WORLDS
from .trust import check_acts, config_file, trust_acts
from .yaml_text import Dumper, parse_yaml_value

__all__ = [
    "RecipeError",
    "dump_recipe",
    "load_image_recipe",
    "load_recipe",
    "recipe_names",
    "recipe_of_keys",
    "trust_recipe",
    "with_keys",
]

R = TypeVar("R", bound=AnyRecipe)


def load_recipe(source: str | Path | None = None, overrides: Iterable[str] = (), *, rewards: bool = True) -> AnyRecipe:
    """Read a recipe by name (of the package) or path, and apply `key.sub=value` overrides.

    Args:
        source: a name such as `default`, or a YAML file; None is `default`. A recipe with `base: NAME` changes the
            recipe NAME key by key. With `@published` after the source, the recipe's `published` section changes it once
            more. If this section has a `base` of its own, the `published` section of that recipe is applied before it.
            Parts for a model, a task and hardware follow a method after `+`, as in `flow_grpo+sd35_medium+ocr+gpus8`;
            they change its published settings.
        overrides: dotted assignments. Values are read as YAML. An entry of a list is given by its number
            (`rewards.0.weight=2`), or by its label or name (`rewards.gold.weight=2`). In a list of parts, a part that
            is missing is added (`penalties.kl.weight=0.01`), and `null` removes a part (`penalties.kl=null`).
        rewards: whether the caller makes the rewards; else only the parts of a run folder's recipe must be trusted.

    Raises:
        RecipeError: if the recipe is unknown, the file cannot be read, a key is unknown (the message names the nearest
            known key), a type is wrong, or the geometry is impossible. All faults are listed at once. Or the file is
            the `config.yaml` of a run folder, and names code or addresses that this machine does not trust.
    """
    name, data = layers("default" if source is None else str(source))
    file = None if source is None else config_file(str(source))
    if file is not None:
        try:
            check_acts(file, data, rewards)
        except ValueError as error:
            raise RecipeError(str(error)) from None
    given = list(overrides)
    for assignment in given:
        _assign(data, assignment)
    lora = next((word for word in given if word.startswith("model.lora")), None)
    if lora is not None and not any(word.startswith("model.train=") for word in given):
        refuse_idle_lora(f"override {lora!r}", {"model": {"lora": lora}}, data)
    try:
        if _of_another_world(str(source), given, data):
            recipe = recipe_of_keys(name, {**data, "data": {**data["data"], "heldout": None}})
            recipe.data.model_fields_set.discard("heldout")
            return recipe
        return recipe_of_keys(name, data)
    except RecipeError as error:
        if guilty := [word for word in given if any(touches(word, place) for place in error.places)]:
            error.args = (str(error).replace(f"{name}:\n", f"{name} with {' '.join(guilty)}:\n", 1),)
        raise


def _of_another_world(source: str, overrides: Iterable[str], data: Mapping[str, Any]) -> bool:
    """Whether a recipe would evaluate its own model, trained on its own prompts, on prompts of an embedded world.

    Nobody has asked for this if the held-out prompts come from the recipe below.
    """
    model, prompts = data.get("model"), data.get("data")
    if not (isinstance(model, Mapping) and isinstance(prompts, Mapping)):
        return False
    kinds = [_is_embedded(model.get("path")), _is_embedded(prompts.get("train"))]
    if any(kinds) or not _is_embedded(prompts.get("heldout")):
        return False
    written = [file.get("data") for file in own_files(source)]
    if any(isinstance(section, Mapping) and "heldout" in section for section in written):
        return False
    return not any(word.partition("=")[0] in ("data", "data.heldout") for word in overrides)


def _is_embedded(value: Any) -> bool:
    """Whether a model or a set of prompts is of an embedded world, as one is that is not given."""
    return value is None or str(value).partition(":")[0] in WORLDS


def touches(assignment: str, place: str) -> bool:
    """Whether an override gives the key of a fault, a section around it, or a key within it."""
    one, other = f"{assignment.partition('=')[0]}.", f"{place}."
    return one.startswith(other) or other.startswith(one)


def recipe_of_keys(name: str, data: Mapping[str, Any]) -> AnyRecipe:
    """The recipe that a mapping of keys describes, without a base.

    Raises:
        RecipeError: as for `load_recipe`, beginning with the name; `places` has the key of each fault.
    """
    schema = _schema_of(name, data)
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        faults = error.errors()
        refused = RecipeError(f"{name}:\n" + "\n".join(explain(fault, schema) for fault in faults))
        refused.places = tuple(".".join(map(str, place)) for fault in faults for place in _places(fault))
        raise refused from None


def with_keys(recipe: R, changes: Mapping[str, Any]) -> R:
    """The recipe with other values of some keys, each written `section.key`.

    Raises:
        ValueError: the schema refuses the recipe with these values.
    """
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return cast("R", type(recipe).model_validate(merge(recipe.model_dump(), sections)))


def _places(fault: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Where a fault is; a fault of a part may have several places within the part."""
    inner = fault["ctx"]["faults"] if fault["type"] == "part" else [((), None, None)]
    return [(*fault["loc"], *place) for place, _, _ in inner]


def trust_recipe(source: str | Path | None, rewards: bool = True) -> str | None:
    """Trust what the `config.yaml` of a run folder would run and send; other recipes need no trust.

    Args:
        source: as for `load_recipe`.
        rewards: whether to trust the rewards too.

    Returns:
        None; if this cannot be remembered, a sentence that says so.

    Raises:
        RecipeError: the recipe cannot be read.
    """
    file = None if source is None else config_file(str(source))
    return None if file is None else trust_acts(file, layers(str(source))[1], rewards)


def load_image_recipe(source: str | Path | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """Like `load_recipe`, but only for recipes of images.

    Raises:
        RecipeError: if the recipe is of another task.
    """
    recipe = load_recipe(source, overrides)
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{recipe.name} is a recipe of task {recipe.task}; this works only on recipes of task images")
    return recipe


def _schema_of(name: str, data: Mapping[str, Any]) -> type[AnyRecipe]:
    task = data.get("task", "images")
    if not isinstance(task, str) or task not in SCHEMAS:
        raise RecipeError(f"{name}:\n  task: {task!r} is not a task; write one of {', '.join(SCHEMAS)}")
    return SCHEMAS[task]


def _assign(data: dict[str, Any], assignment: str) -> None:
    key, equals, raw = assignment.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {assignment!r} is not key=value; write for example run.iterations=50")
    try:
        value = parse_yaml_value(raw)
    except ValueError as error:
        raise RecipeError(f"override {assignment!r:.200}: {error}") from None
    place: Any = data
    *parents, last = key.split(".")
    if not all((*parents, last)):
        raise RecipeError(f"override {assignment!r}: a key between dots is empty; write for example run.iterations=50")
    kind = _kinds_of_lists(data).get(parents[0]) if parents else None
    for depth, part in enumerate(parents):
        if isinstance(place, list):
            place = _entry(place, part, kind, assignment)
        else:
            # A section that is left out may be written as null (`ema: null`); an assignment within it creates it again.
            if place.get(part) is None:
                place[part] = [] if kind is not None and depth == 0 else {}
            elif isinstance(place[part], str) and part != "name":
                # A part that is only a name has no options yet.
                place[part] = {"name": place[part]}
            place = place[part]
        if not isinstance(place, dict | list):
            raise RecipeError(f"override {assignment!r}: {'.'.join(parents[: depth + 1])} is a value, not a section")
    if isinstance(place, list):
        _replace(place, last, value, kind, assignment)
    elif last == "name" and parents and place.get("name") not in (None, value):
        # The options belong to the previous part.
        place.clear()
        place[last] = value
    else:
        place[last] = _over_part(place.get(last), value)


def _over_part(below: Any, value: Any) -> Any:
    """A value given to a key: options without a name change the part at the key; any other value replaces it."""
    is_part = isinstance(below, str) or (isinstance(below, dict) and "name" in below)
    return over(below, value) if is_part and isinstance(value, dict) and "name" not in value else value


def _kinds_of_lists(data: Mapping[str, Any]) -> dict[str, str]:
    """Keys of a recipe that hold a list of parts, with the kind of the parts."""
    task = data.get("task")
    return _lists_of(SCHEMAS.get(task, Recipe) if isinstance(task, str) else Recipe)


@cache
def _lists_of(schema: type[AnyRecipe]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, field in schema.model_fields.items():
        for entry in get_args(field.annotation) if get_origin(field.annotation) is list else ():
            for each in getattr(entry, "__metadata__", ()):
                if isinstance(each, Of):
                    found[key] = each.kind
    return found


def _entry(place: list[Any], part: str, kind: str | None, assignment: str) -> Any:
    """The entry of a list, by its number, label or name; in a list of parts, a missing entry is added."""
    at = _place_of(place, part)
    if at is None:
        if kind is None or part.isdigit():
            raise RecipeError(_no_entry(place, part, assignment))
        place.append({"name": part})
        return place[-1]
    if isinstance(place[at], str):
        place[at] = {"name": place[at]}
    return place[at]


def _replace(place: list[Any], part: str, value: Any, kind: str | None, assignment: str) -> None:
    """Replace an entry of a list by a value; null removes a part that is given by its name."""
    key = assignment.partition("=")[0]
    at = _place_of(place, part)
    if kind is None or part.isdigit():
        if at is None:
            raise RecipeError(_no_entry(place, part, assignment))
        place[at] = value
    elif isinstance(value, dict):
        at = len(place) if at is None else at
        place[at : at + 1] = [{"name": part, **value}]
    elif value is not None:
        raise RecipeError(
            f"override {assignment!r}: {part} is {with_article(kind)} with options; set one of these, as "
            f"{key}.OPTION=VALUE, or remove the part with {key}=null"
        )
    elif at is not None:
        del place[at]
    else:
        try:
            KINDS[kind].resolve(part)
        except ValueError as error:
            raise RecipeError(f"override {assignment!r}: {error}") from None


def _place_of(place: list[Any], part: str) -> int | None:
    """Index of an entry of a list, given by its number, its label, or its name with or without the file."""
    if re.fullmatch("[0-9]{1,9}", part):
        return int(part) if int(part) < len(place) else None
    named = [_named(entry) for entry in place]
    return next((named.index(names) for names in named if part in names), None)


def _named(entry: Any) -> list[str]:
    """The names of an entry of a list."""
    if isinstance(entry, str):
        return [entry, entry.rpartition(":")[2]]
    if not isinstance(entry, dict):
        return []
    given = next((entry[key] for key in ("label", "name") if isinstance(entry.get(key), str)), "")
    return [given, given.rpartition(":")[2]]


def _no_entry(place: list[Any], part: str, assignment: str) -> str:
    names = list(dict.fromkeys(names[0] for names in map(_named, place) if names))
    listed = f", or name one of {', '.join(names)}" if names else ""
    return f"override {assignment!r}: {part!r} is not an entry of a list of {len(place)}; count from 0{listed}"


def dump_recipe(recipe: AnyRecipe) -> str:
    """A recipe as YAML, with every value written out."""
    return yaml.dump(plain(recipe), Dumper=Dumper, sort_keys=False, allow_unicode=True)
