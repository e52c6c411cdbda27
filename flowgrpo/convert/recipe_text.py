"""The recipe of a conversion as text, without values that no recipe may have, above the base that makes it shortest."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from ..configs.layers import layers, merge
from ..configs.load import RecipeError, recipe_of_keys
from ..configs.schema import AnyRecipe
from ..configs.yaml_text import Dumper
from ..parts.choice import plain
from .conversion import Carried, Conversion, Remark

ORDER = (
    "base", "name", "task", "model", "data", "sampler", "generation", "rollout", "rewards", "advantage",
    "transform", "clamp", "select", "objective", "penalties", "optimizer", "evaluate", "run",
)  # fmt: skip
"""Keys of a recipe in the order in which a conversion writes them; other keys follow."""
WIDTH = 118


def fitted(conversion: Conversion) -> AnyRecipe:
    """The recipe of a conversion. A carried value that no recipe may have becomes a setting that is not carried over.

    Raises:
        ValueError: the settings do not go together here; the message says why.
    """
    while True:
        try:
            return recipe_of_keys(conversion.settings.place, conversion.recipe)
        except RecipeError as error:
            refused = [row for row in conversion.carried if any(_touches(row.ours, place) for place in error.places)]
            if not refused:
                raise ValueError(
                    f"{str(error).replace(':', ': its settings do not go together here:', 1)}\n"
                    "  change the settings in the file, and convert it again"
                ) from None
            for row in refused:
                _take_out(conversion, row, str(error))


def as_yaml(value: Any, width: int = WIDTH) -> str:
    """A value as YAML; the innermost mappings and lists stand on one line each."""
    text: str = yaml.dump(
        value, Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=width
    )
    return text


def _touches(ours: str, place: str) -> bool:
    return place == ours or place.startswith(f"{ours}.") or ours.startswith(f"{place}.")


def _take_out(conversion: Conversion, row: Carried, said: str) -> None:
    line = next((line.strip() for line in said.splitlines() if _touches(row.ours, line.strip().partition(":")[0])), "")
    conversion.carried.remove(row)
    conversion.lost.append(Remark(row.theirs, line or f"{row.ours} cannot have this value"))
    *parents, last = row.ours.split(".")
    place: Any = conversion.recipe
    for parent in parents:
        place = place.get(parent, {}) if isinstance(place, dict) else {}
    if isinstance(place, dict):
        place.pop(last, None)


def recipe_text(conversion: Conversion, recipe: AnyRecipe, source: str) -> str:
    """The recipe as YAML, above the base that makes it shortest. What could not be carried over stands in comments.

    Args:
        conversion: with the keys of the recipe.
        recipe: the recipe of these keys.
        source: what was converted, for the first line.
    """
    candidates = [_ordered(conversion.recipe)]
    candidates += [above for base in conversion.bases if (above := _above(base, conversion.recipe, recipe)) is not None]
    texts = [as_yaml(keys) for keys in candidates]
    shortest = min(texts, key=lambda text: text.count("\n"))
    comments = [f"# Converted from {source} by flowgrpo"]
    if conversion.lost:
        comments.append("# Not carried over:")
    for remark in conversion.lost:
        told = f"{remark.theirs}: {remark.text}" if remark.theirs else remark.text
        comments += textwrap.wrap(told, WIDTH, initial_indent="# - ", subsequent_indent="#   ")
    return "\n".join(comments) + "\n" + shortest


def _above(base: str, keys: Mapping[str, Any], recipe: AnyRecipe) -> dict[str, Any] | None:
    """The keys that make a base this recipe; None if a base has something that no key above it can take away."""
    below = layers(base)[1]
    had = plain(recipe_of_keys(base, below))
    wanted = plain(recipe)
    # The base has the paper of its method.
    wanted["paper"] = had["paper"]
    if had["task"] != wanted["task"]:
        return None
    if wanted["model"]["train"] == "full" and "lora" in wanted["model"]:
        # The numbers of a LoRA have no effect, and a recipe that writes them is refused.
        wanted["model"] = {**wanted["model"], "lora": had["model"]["lora"]}
    written = {"base": base, **_difference(keys, wanted, had)}
    try:
        same = plain(recipe_of_keys(base, merge(below, {k: v for k, v in written.items() if k != "base"}))) == wanted
    except RecipeError:
        return None
    return _ordered(written) if same else None


def _difference(keys: Any, wanted: Mapping[str, Any], had: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be written above `had` to get `wanted`, as `keys` writes it where it does."""
    found = {}
    for key, value in wanted.items():
        if key in had and had[key] == value:
            continue
        written = keys.get(key) if isinstance(keys, Mapping) else None
        inner: Any = had.get(key)
        another = not (isinstance(value, Mapping) and isinstance(inner, Mapping)) or value.get("name") != inner.get(
            "name"
        )
        if another:
            found[key] = value if written is None and value is not None else written
        else:
            found[key] = _difference(written, value, inner)
    return found


def _ordered(keys: Mapping[str, Any]) -> dict[str, Any]:
    first = {key: keys[key] for key in ORDER if key in keys}
    return first | {key: value for key, value in keys.items() if key not in first}
