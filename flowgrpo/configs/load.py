"""Reading recipes: from a file or by name, with dotted overrides, every fault named with its place and mend."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from .schema import AnyRecipe, Recipe, TextRecipe


class RecipeError(ValueError):
    """A recipe that cannot be used; the message lists every fault found."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-3` as text; everybody else, YAML 1.2 included, as a number."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def recipe_names(task: str | None = None) -> dict[str, str]:
    """Recipes that come with the package, or those of a task: name -> first comment line of the file."""
    folder = resources.files("flowgrpo.configs") / "recipes"
    found = {}
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".yaml"):
            first = entry.read_text(encoding="utf-8").splitlines()[0]
            found[entry.name.removesuffix(".yaml")] = first.lstrip("# ").strip()
    if task is None:
        return found
    return {name: line for name, line in found.items() if _layers(name)[1].get("task", "images") == task}


def load_recipe(source: str | Path | None = None, overrides: Iterable[str] = ()) -> AnyRecipe:
    """Read a recipe by name (of the package) or path, and apply `key.sub=value` overrides.

    Args:
        source: a name such as `default`, or a YAML file; None is `default`. A recipe with `base: NAME` changes that
            recipe key by key; with `@published` after the source, its `published` section changes it once more, after
            that of the recipe which the section names as its own `base`.
        overrides: dotted assignments; values are read as YAML, list entries by number (`rewards.0.weight=2`).

    Raises:
        RecipeError: unknown recipe, unreadable file, unknown key (the nearest known one is named), wrong type,
            or impossible geometry. All faults are listed at once.
    """
    name, data = _layers(str(source or "default"))
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


def _layers(source: str, derived: tuple[str, ...] = ()) -> tuple[str, dict[str, Any]]:
    """The recipe a source names, with what it builds on merged in, and a name for messages."""
    place, at, layer = source.rpartition("@")
    if not at or layer != "published":
        place, layer = source, ""
    name, text = _read(place)
    data = _parse(name, text)
    published, base = data.pop("published", None), data.pop("base", None)
    if base is not None:
        if not isinstance(base, str):
            raise RecipeError(f"{name}: base is {base!r}; write the name of a recipe or a file")
        beside = Path(name).parent / base
        base = str(beside) if beside.is_file() else base
        if base in (*derived, name):
            raise RecipeError(f"{name}: `base: {base}` leads back to itself")
        data = _merge(_layers(base, (*derived, name))[1], data)
    if layer:
        data = _merge(data, _published(name, published))
    return name, data


def _published(name: str, section: Any, derived: tuple[str, ...] = ()) -> dict[str, Any]:
    """A `published` section, upon that of the recipe it names as its `base`."""
    if not isinstance(section, dict):
        raise RecipeError(f"{name} has no `published` section; leave out @published")
    base = section.get("base")
    if base is None:
        return section
    if base in (*derived, name):
        raise RecipeError(f"{name}: `published.base: {base}` leads back to itself")
    below = _published(base, _parse(*_read(base)).get("published"), (*derived, name))
    return _merge(below, {key: value for key, value in section.items() if key != "base"})


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the keys of `above` in their place; sections are merged, lists and values replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _read(key: str) -> tuple[str, str]:
    known = recipe_names()
    if key in known:
        path = resources.files("flowgrpo.configs") / "recipes" / f"{key}.yaml"
        return key, path.read_text(encoding="utf-8")
    file = Path(key)
    if file.is_file():
        try:
            return key, file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RecipeError(f"{key} is not UTF-8 text (byte {error.start}); give a YAML file") from None
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise RecipeError(f"no recipe or file {key!r}; {hint}recipes: {', '.join(known)} (or give the path of a YAML file)")


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        data = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{name} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{name} holds {type(data).__name__}, not a mapping of recipe keys")
    return data


def _assign(data: dict[str, Any], assignment: str) -> None:
    key, equals, raw = assignment.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {assignment!r} is not key=value; write for example run.iterations=50")
    try:
        value = yaml.load(raw, _Loader)
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
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)


def dump_recipe(recipe: AnyRecipe) -> str:
    """A recipe as YAML, every value written out."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
