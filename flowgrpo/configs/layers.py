"""One mapping from the words that name a recipe: a file, the recipe that it builds on, and the parts put on it."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from .yaml_text import as_mapping, kind_of, parse_yaml, read_text


class RecipeError(ValueError):
    """A recipe that cannot be used; the message lists every fault found.

    Attributes:
        places: dotted key of each fault in a recipe that could be read; empty for a fault of the recipe as a whole.
    """

    places: tuple[str, ...] = ()


KINDS = {"models": "model", "tasks": "task", "hardware": "hardware"}
"""Folder of a kind of part -> name of the kind, in the order in which parts are put on a method."""


@dataclass(frozen=True)
class Part:
    """A layer of a recipe: the settings for one model, one task, or some hardware.

    Attributes:
        name: name of its file.
        kind: a key of `KINDS`.
        line: first comment line of the file.
        names: name of the part, and name of the part that it changes (`base`).
        paper: source of its settings.
        recipe: keys of a recipe, with the values of the part.
        special: names joined by `+` -> keys of a recipe. The keys apply if every name is the method, a recipe on which
            the method builds, or one of the parts.
        medium: "images" or "videos": what a model makes, or the only medium of a task; None for any.
        files: for a task, a description of its prompt files and their columns.
        prompts: for a task, the approximate number of training prompts in the published file.
        machine: for hardware, `gpus` (their number), `gpu` (their name) and `prompts` (the most it is meant for).
    """

    name: str
    kind: str
    line: str
    names: frozenset[str]
    paper: str
    recipe: dict[str, Any]
    special: dict[str, dict[str, Any]]
    medium: str | None
    files: str
    prompts: int | None
    machine: dict[str, Any]


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`below`, overridden by the keys of `above`: sections are merged, lists and values are replaced.

    If `above` gives another name to a part (a mapping with a `name`, or only the name), the options of the previous
    part are dropped.
    """
    merged = dict(below)
    for key, value in above.items():
        merged[key] = over(merged.get(key), value)
    return merged


def over(below: Any, above: Any) -> Any:
    """The value `below` at a key, overridden by the value `above`."""
    if isinstance(above, dict) and isinstance(below, str) and "name" not in above:
        below = {"name": below}
    if isinstance(above, str) and isinstance(below, dict) and "name" in below:
        above = {"name": above}
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    if "name" in above and above["name"] != below.get("name"):
        return above
    return merge(below, above)


def refuse_idle_lora(place: str, above: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    """Refuse settings of a LoRA that a layer gives, where a layer below says that all weights are trained.

    Args:
        place: the file or the override that gives them, for the message.
        above: the keys of the layer.
        merged: the recipe with the layer.

    Raises:
        RecipeError: the settings would have no effect.
    """
    own, model = above.get("model"), merged.get("model")
    given = isinstance(own, Mapping) and bool(own.get("lora")) and "train" not in own
    if given and isinstance(model, Mapping) and model.get("train") == "full":
        raise RecipeError(
            f"{place}: model.lora has no effect, because the recipe trains all weights (model.train: full); write "
            "model.train: lora beside it, and a learning rate for a LoRA, usually ten times higher. A run that begins "
            "with the result of a run of all weights has model.path: RUN/pipeline"
        )


@cache
def recipe_lines() -> dict[str, str]:
    """Recipes that come with the package: name -> first comment line of the file."""
    folder = resources.files("flowgrpo.configs") / "recipes"
    return {name: _first_line(text) for name, text in _texts(folder)}


def recipe_names(task: str | None = None) -> dict[str, str]:
    """Recipes of the package, all or those of one task: name -> first comment line of the file."""
    found = dict(recipe_lines())
    if task is None:
        return found
    return {name: line for name, line in found.items() if layers(name)[1].get("task", "images") == task}


@cache
def parts() -> dict[str, Part]:
    """Parts that come with the package, by name, kind by kind."""
    folder = resources.files("flowgrpo.configs") / "parts"
    found: dict[str, Part] = {}
    for kind in KINDS:
        texts = dict(_texts(folder / kind))
        found |= {name: _part(name, kind, texts) for name in texts}
    return found


def layers(source: str, derived: tuple[str, ...] = ()) -> tuple[str, dict[str, Any]]:
    """A name for messages, and the recipe that a source names, merged with the recipe on which it builds."""
    if "+" in source and not Path(source.partition("@")[0]).is_file():
        return _composed(source, derived)
    place, at, layer = source.rpartition("@")
    if not at or layer != "published":
        place, layer = source, ""
    name, text = _read(place)
    data = _parse(name, text)
    published, base = data.pop("published", None), data.pop("base", None)
    if base is not None:
        below = layers(_base(name, base, derived), (*derived, name))[1]
        refuse_idle_lora(name, data, merged := merge(below, data))
        data = merged
    if layer:
        data = merge(data, _published(name, published))
    return name, data


def own_files(source: str) -> list[dict[str, Any]]:
    """The files that are not of the package, among the files of a source and of the recipes on which it builds."""
    place, found = source.partition("@")[0], list[dict[str, Any]]()
    while place not in recipe_lines() and Path(place).is_file():
        data = _parse(*_read(place))
        found.append(data)
        place = _base(place, data["base"], ()) if data.get("base") is not None else ""
    return found


def bases(source: str) -> list[str]:
    """The recipes on which a source builds, the nearest first; for a method with parts, the method is the first.

    Raises:
        RecipeError: one of them cannot be read, or leads back to another.
    """
    place = _method(source)
    found = [place] if parts_of(source) else []
    while (base := _parse(*_read(place)).get("base")) is not None:
        found.append(_base(place, base, tuple(found)))
        place = _method(found[-1])
    return found


def has_published(source: str) -> bool:
    """Whether a source is a recipe with a `published` section that the source does not name."""
    return _method(source) == source and "published" in _parse(*_read(source))


def _method(source: str) -> str:
    """The recipe that a source names, without parts and `@published`."""
    if "+" in source and not Path(source.partition("@")[0]).is_file():
        source = source.partition("+")[0]
    return source.removesuffix("@published")


def parts_of(source: str | Path | None) -> list[Part]:
    """The parts that a source names, in the order in which they are put on; an empty list if it names none.

    Raises:
        RecipeError: if a part is unknown, or there are two of one kind.
    """
    words = str(source or "").split("+")[1:]
    if not words or Path(str(source)).is_file():
        return []
    known = parts()
    chosen: dict[str, Part] = {}
    for word in words:
        if word not in known:
            raise RecipeError(_no_part(word, str(source), known))
        part = known[word]
        if part.kind in chosen and chosen[part.kind].name != word:
            raise RecipeError(
                f"{source}: {chosen[part.kind].name} and {word} are both of kind {KINDS[part.kind]}; name one of them"
            )
        chosen[part.kind] = part
    model, task = chosen.get("models"), chosen.get("tasks")
    if model and task and task.medium not in (None, model.medium):
        raise RecipeError(f"{source}: {task.name} is a task of {task.medium}, and {model.name} makes {model.medium}")
    return [chosen[kind] for kind in KINDS if kind in chosen]


def machine_of(source: str | Path | None) -> dict[str, Any]:
    """`Part.machine` of the hardware part that a source names, or a recipe on which its file builds; {} if none does.

    Raises:
        RecipeError: the source cannot be read.
    """
    own = next((part.machine for part in parts_of(source) if part.machine), None)
    if own is not None:
        return own
    place = str(source or "").partition("@")[0]
    if not Path(place).is_file():
        return {}
    name, text = _read(place)
    base = _parse(name, text).get("base")
    return {} if base is None else machine_of(_base(name, base, ()))


def prompt_file_note(source: str) -> str | None:
    """The description of a prompt file that belongs to a task part; None for other paths."""
    part = _task_of(source)
    return None if part is None else part.files


def prompts_of_file(source: str) -> int | None:
    """Approximate number of prompts in the training file of a task part; None for other paths."""
    part = _task_of(source)
    return None if part is None or source != (part.recipe.get("data") or {}).get("train") else part.prompts


def _task_of(source: str) -> Part | None:
    return next((part for part in parts().values() if source in (part.recipe.get("data") or {}).values()), None)


def _composed(source: str, derived: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """A method with parts put on it: its published settings, if it has any, and then the settings of each part."""
    method = source.partition("+")[0]
    if method in parts():
        raise RecipeError(f"{source}: {method} is a part; begin with a method: {', '.join(recipe_lines())}")
    chosen = parts_of(source)
    place = method.removesuffix("@published")
    published = "published" in _parse(*_read(place))
    _, data = layers(f"{place}@published" if published else method, derived)
    if data.get("task", "images") != "images":
        raise RecipeError(f"{source}: {place} is a recipe of text; parts can only be put on recipes of images")
    active = _lineage(place).union(*(part.names for part in chosen))
    for part in chosen:
        data = merge(data, part.recipe)
        for names, section in part.special.items():
            if set(names.split("+")) <= active:
                data = merge(data, section)
    name = "+".join([place, *(part.name for part in chosen)])
    papers = [data.get("paper", ""), *(part.paper for part in chosen)]
    # Parts are read only once, and overrides write into the returned mapping.
    return name, {**copy.deepcopy(data), "name": name, "paper": " ".join(paper.strip() for paper in papers if paper)}


def _lineage(place: str) -> set[str]:
    """A method and all recipes on which it builds."""
    return {place, *bases(place)}


def _base(name: str, base: Any, derived: Sequence[str]) -> str:
    if not isinstance(base, str) or not base:
        raise RecipeError(f"{name}: base is {base!r}; write the name of a recipe or a file")
    beside = Path(name).parent / base
    base = str(beside) if beside.is_file() else base
    if not beside.is_file() and base.endswith((".yaml", ".yml")) and not Path(base).is_file():
        raise RecipeError(f"{name}: base is {base!r}, and there is no such file beside it or here")
    if _same_place(base, (*derived, name)):
        raise RecipeError(f"{name}: `base: {base}` leads back to itself")
    return base


def _same_place(base: str, names: Sequence[str]) -> bool:
    """Whether a base is one of the recipes before it, even if the path is written differently."""
    if base in names:
        return True
    return Path(base).is_file() and Path(base).resolve() in [Path(name).resolve() for name in names]


def _published(name: str, section: Any, derived: tuple[str, ...] = ()) -> dict[str, Any]:
    """A `published` section, merged onto the `published` section of its own `base`."""
    if section is None:
        raise RecipeError(f"{name} has no `published` section; leave out @published")
    if not isinstance(section, dict):
        raise RecipeError(f"{name}: `published` is {kind_of(section)}; write a mapping of recipe keys")
    base = section.get("base")
    if base is None:
        return section
    if not isinstance(base, str) or not base:
        raise RecipeError(f"{name}: published.base is {base!r}; write the name of a recipe or a file")
    if _same_place(base, (*derived, name)):
        raise RecipeError(f"{name}: `published.base: {base}` leads back to itself")
    below = _published(base, _parse(*_read(base)).get("published"), (*derived, name))
    return merge(below, {key: value for key, value in section.items() if key != "base"})


def _part(name: str, kind: str, texts: Mapping[str, str]) -> Part:
    data, base = _parse(name, texts[name]), None
    if "base" in data:
        base = str(data.pop("base"))
        data = merge(_parse(base, texts[base]), data)
    return Part(
        name=name,
        kind=kind,
        line=_first_line(texts[name]),
        names=frozenset({name, base or name}),
        paper=str(data.pop("paper", "")),
        special=data.pop("for", {}),
        medium=data.pop("medium", None),
        files=str(data.pop("files", "")).strip(),
        prompts=data.pop("prompts", None),
        machine=data.pop("machine", {}),
        recipe=data,
    )


def part_hint(word: str) -> str:
    """A sentence that shows how a part is used, for the name of a part or its beginning; empty for other words."""
    known = parts()
    begun = [word] if word in known else [name for name in known if word and name.startswith(word)]
    if not begun:
        return ""
    of = _FOR[known[begun[0]].kind]
    if len(begun) == 1:
        return f"{begun[0]} is a part for {of}; write it after a method, as in flow_grpo+{begun[0]}"
    return f"{', '.join(begun)} are parts for {of}; write one of them after a method, as in flow_grpo+{begun[-1]}"


_FOR = {"models": "a model", "tasks": "a task", "hardware": "hardware"}


def _no_part(word: str, source: str, known: Mapping[str, Part]) -> str:
    near = [name for name in known if word and name.startswith(word)] or difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if word in recipe_lines():
        hint = f"{word} is a method, and only the first word can name a method. "
    listed = [f"{kind}: {', '.join(n for n, part in known.items() if part.kind == kind)}" for kind in KINDS]
    return f"{source}: no part {word!r}; {hint}Parts are {'; '.join(listed)}"


def _texts(folder: Any) -> list[tuple[str, str]]:
    """Name and text of each YAML file in a folder of the package."""
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return [(entry.name.removesuffix(".yaml"), entry.read_text(encoding="utf-8")) for entry in files]


def _first_line(text: str) -> str:
    return text.splitlines()[0].lstrip("# ").strip()


def _read(key: str) -> tuple[str, str]:
    known = recipe_lines()
    if key in known:
        path = resources.files("flowgrpo.configs") / "recipes" / f"{key}.yaml"
        return key, path.read_text(encoding="utf-8")
    file = Path(key)
    if file.is_file():
        try:
            return key, read_text(file)
        except ValueError as error:
            raise RecipeError(str(error)) from None
    if not key:
        raise RecipeError("the recipe has no name; write the name of a recipe or the path of a YAML file")
    if (file / "config.yaml").is_file():
        raise RecipeError(
            f"{key} is a run folder, not a recipe; {file / 'config.yaml'} is its recipe, and `flowgrpo resume {key}` "
            "continues the run"
        )
    if file.is_dir():
        raise RecipeError(f"{key} is a folder; write the name of a recipe or the path of a YAML file")
    if file.suffix in (".yaml", ".yml"):
        there = [str(one) for end in (".yaml", ".yml") for one in file.parent.glob(f"*{end}")]
        close = difflib.get_close_matches(str(file), there, n=1, cutoff=0.8)
        hint = f"did you mean {close[0]!r}? Else " if close else ""
        raise RecipeError(
            f"no recipe or file {key!r}; {hint}give the path of a YAML file, or a name that `flowgrpo recipes` lists"
        )
    if part := part_hint(key):
        raise RecipeError(f"no recipe or file {key!r}; {part}")
    if owners := _kinds_of(key):
        raise RecipeError(f"no recipe or file {key!r}; {key} is a part: write it at {owners} of a recipe")
    beside = Path(f"{key}.yaml")
    near = [str(beside)] if beside.is_file() else difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise RecipeError(f"no recipe or file {key!r}; {hint}recipes: {', '.join(known)} (or give the path of a YAML file)")


def _kinds_of(name: str) -> str:
    """The keys at which recipes choose a part of this name, such as a loss; empty if there is none."""
    # The parts import torch, which a recipe that is there is read without.
    from ..parts.kinds import KINDS as PARTS

    return " or ".join(f"{kind.key} ({kind.word})" for kind in PARTS.values() if name in kind.builtin)


def _parse(name: str, text: str) -> dict[str, Any]:
    """A copy of the keys of a recipe. A text is read only once, since most recipes build on the same few recipes."""
    return copy.deepcopy(_parsed(name, text))


@cache
def _parsed(name: str, text: str) -> dict[str, Any]:
    try:
        return as_mapping(parse_yaml(text, name), name, "recipe keys, such as `base: default`")
    except ValueError as error:
        raise RecipeError(str(error)) from None
