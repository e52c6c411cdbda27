"""How two recipes differ, key by key, and how a recipe differs from the defaults of its schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from ..parts.choice import Choice, default_of, options_model, plain
from ..parts.docstrings import summary
from ..parts.section import Section
from .key_meanings import NOTES_OF
from .reward_sections import RewardConfig
from .schema import SCHEMAS, AnyRecipe
from .yaml_text import in_one_line

LABELS = ("name", "paper", "task")
"""Keys of a recipe that say what it is, and change nothing in a run of its task."""
_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """A key at which two recipes differ.

    Attributes:
        key: the dotted key. In a list of parts or rewards, an entry has its name or label in place of its number.
        first: the value in the first recipe, line by line: for another part its name and then its options, for a value
            its YAML, and a dash for what is not there.
        second: the value in the second recipe.
        says: the first sentence of what the key does; empty if nothing describes it.
    """

    key: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    says: str


def differences(first: AnyRecipe, second: AnyRecipe) -> list[Difference]:
    """The keys at which two recipes differ, in the order of the schema; for two tasks, among the keys that both have.

    The name, the paper and the task of a recipe are left out.
    """
    return list(_of_sections(first, second, "", "", NOTES_OF[first.task]))


def defaults_of(recipe: AnyRecipe) -> AnyRecipe:
    """The defaults of the task of a recipe; rewards have no default, so it has none."""
    # Rewards are required, and only the rest is used.
    whole = SCHEMAS[recipe.task].model_validate({"task": recipe.task, "rewards": [{"name": "gold"}]})
    return whole.model_copy(update={"rewards": []})


def only_of(first: AnyRecipe, second: AnyRecipe) -> list[str]:
    """The sections and keys that the task of the first recipe has, and the task of the second has not."""
    return list(_missing(first, second))


def _missing(first: Section, second: Section, key: str = "") -> Iterator[str]:
    for name in type(first).model_fields:
        mine, other = getattr(first, name), getattr(second, name, None)
        if name not in type(second).model_fields:
            yield key + name
        elif isinstance(mine, Section) and isinstance(other, Section):
            yield from _missing(mine, other, f"{key}{name}.")


def _of_sections(
    first: Section, second: Section, key: str, place: str, notes: Mapping[str, str]
) -> Iterator[Difference]:
    """Differences of two sections; `place` is the key as the notes have it, with `[]` for an entry of a list."""
    for name, field in type(first).model_fields.items():
        if name in type(second).model_fields and (key or name not in LABELS):
            says = field.description or notes.get(place + name, "")
            values = getattr(first, name), getattr(second, name)
            yield from _of_values(*values, key + name, place + name, says, notes)


def _of_values(
    first: Any, second: Any, key: str, place: str, says: str, notes: Mapping[str, str]
) -> Iterator[Difference]:
    if first is not _ABSENT and second is not _ABSENT and plain(first) == plain(second):
        return
    if isinstance(first, Choice) and isinstance(second, Choice) and _same_part(first, second):
        fields = options_model(first.kind, first.name).model_fields
        for name, field in fields.items():
            values = first.get(name, _ABSENT), second.get(name, _ABSENT)
            yield from _of_values(*values, f"{key}.{name}", f"{place}.{name}", field.description or "", notes)
    elif isinstance(first, Section) and isinstance(second, Section):
        yield from _of_sections(first, second, f"{key}.", f"{place}.", notes)
    elif isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in dict.fromkeys([*first, *second]):
            values = first.get(name, _ABSENT), second.get(name, _ABSENT)
            yield from _of_values(*values, f"{key}.{name}", f"{place}.{name}", says, notes)
    elif (listed := _by_label(first)) is not None and (others := _by_label(second)) is not None:
        for label in dict.fromkeys([*listed, *others]):
            values = listed.get(label, _ABSENT), others.get(label, _ABSENT)
            yield from _of_values(*values, f"{key}.{label}", f"{place}[]", _of_entry(*values) or says, notes)
        both = [[label for label in some if label in listed and label in others] for some in (listed, others)]
        if both[0] != both[1]:
            yield Difference(f"{key} (order)", (", ".join(both[0]),), (", ".join(both[1]),), _sentence(says))
    else:
        # Of an entry that one of the recipes lacks, the key ends in the name.
        known = key.rpartition(".")[2] if _ABSENT in (first, second) else ""
        yield Difference(key, tuple(_lines(first, known)), tuple(_lines(second, known)), _sentence(says))


def _of_entry(first: Any, second: Any) -> str:
    """What an entry of a list of parts is; empty for other entries."""
    part = next((entry for entry in (first, second) if isinstance(entry, Choice)), None)
    return "" if part is None else summary(part.target)


def _same_part(first: Choice, second: Choice) -> bool:
    return (first.kind, first.name) == (second.kind, second.name)


def _by_label(entries: Any) -> dict[str, Any] | None:
    """The entries of a list of parts or sections by their names; None for other values, and for names that repeat."""
    if not isinstance(entries, list) or not all(isinstance(entry, Choice | Section) for entry in entries):
        return None
    found = {_label(entry, number): entry for number, entry in enumerate(entries)}
    return found if len(found) == len(entries) else None


def _label(entry: Choice | Section, number: int) -> str:
    if isinstance(entry, RewardConfig):
        return entry.known_as
    name = entry.short if isinstance(entry, Choice) else getattr(entry, "name", None)
    return str(number) if name is None else str(name)


def _lines(value: Any, known: str = "") -> Iterator[str]:
    """A value that the other recipe does not have, or has otherwise; the name `known` is not said again."""
    if value is _ABSENT:
        yield "–"
    elif isinstance(value, Choice):
        lines = [value.name] * (value.name != known) + list(_options(value))
        yield from lines or ["with its defaults"]
    elif isinstance(value, Section):
        fields = type(value).model_fields.items()
        own = {name: getattr(value, name) for name, field in fields if not _is_default(getattr(value, name), field)}
        lines = [f"{name}: {in_one_line(plain(found))}" for name, found in own.items() if found != known]
        yield from lines or ["with its defaults"]
    elif value and (listed := _by_label(value)) is not None:
        for label, entry in listed.items():
            lines = [line for line in _lines(entry, label) if line != "with its defaults"]
            yield ", ".join([label, *lines])
    else:
        yield in_one_line(plain(value))


def _is_default(value: Any, field: FieldInfo) -> bool:
    return not field.is_required() and plain(value) == default_of(field)


def _options(part: Choice, prefix: str = "") -> Iterator[str]:
    """The options of a part, each on a line; an option that is null is off, and is left out."""
    for name, value in part.options.items():
        if isinstance(value, Choice):
            yield f"{prefix}{name}: {value.name}"
            yield from _options(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}: {in_one_line(plain(value))}"


def _sentence(text: str) -> str:
    """The first sentence of a description, without links and marks of Markdown."""
    bare = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
    bare = "" if bare.startswith("See ") else bare
    # A sentence ends before a capital letter; `0.5` goes on.
    return re.split(r"(?<=[.:;]) (?=[A-Z])", bare, maxsplit=1)[0]
