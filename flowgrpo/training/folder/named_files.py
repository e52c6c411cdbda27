"""The files that a recipe names: prompts, code of rewards and parts, a LoRA to start from. Have they changed?

A run goes on to the same numbers only if it reads the same files again. So a checkpoint holds their sizes and checksums
from the start of the process that wrote it, because a run does not read them again later. Code may import modules that
lie beside it. Those that it has imported when the run begins count as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...configs.yaml_text import parse_yaml
from .checkpoint import inputs_before, measured

_UNREAD = "data.test"
"""No run reads this file, not even for a checksum."""
_OURS = __name__.partition(".")[0]
"""This package, whose folder may be the folder of a reward."""


def measured_inputs(recipe: str) -> dict[str, Any]:
    """Size and checksum of each file that a recipe names, by the key that names it, such as `rewards.0.name`.

    A module that the code of the recipe has imported from its own folder has the key `module NAME`. Folders and files
    that cannot be read are left out.

    Args:
        recipe: the recipe, as YAML.
    """
    found = {}
    for key, file in _files(recipe).items():
        try:
            found[key] = measured(file)
        except OSError:
            # What needs the file says why it cannot be read.
            continue
    return found


def changed_inputs(recipe: str, inputs: Mapping[str, Any], checkpoint: Path) -> Iterator[str]:
    """A sentence on the files that are no longer what they were for a checkpoint; nothing if they all are.

    A key that the checkpoint lacks says nothing.

    Args:
        recipe: the recipe, as YAML.
        inputs: `measured_inputs` of the recipe.
        checkpoint: the checkpoint from which the run goes on.
    """
    before = inputs_before(checkpoint)
    files = _files(recipe)
    changed: dict[Path, list[str]] = {}
    for key, content in inputs.items():
        if key in before and before[key] != content:
            changed.setdefault(files[key], []).append(key)
    if changed:
        listed = ", ".join(f"{file} ({', '.join(keys)})" for file, keys in changed.items())
        yield (
            f"the run of {checkpoint.name} read other contents of {listed}; it goes on with what is there now, so its "
            "numbers are not those of an uninterrupted run"
        )


def _files(recipe: str) -> dict[str, Path]:
    """The files that a recipe names, by the key that names each, and the modules beside them."""
    named = {
        key: Path(file)
        for key, text in _texts(parse_yaml(recipe, "the recipe of the run"))
        if key != _UNREAD and (file := _file(text)) is not None
    }
    return named | _imported({str(file.resolve().parent) for file in named.values() if file.suffix == ".py"})


def _imported(folders: set[str]) -> dict[str, Path]:
    """The imported modules that lie in these folders, by `module NAME`.

    The place of a module's file follows from its name. Packages that are installed below a folder have other places.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or name.partition(".")[0] == _OURS:
            continue
        inner = os.path.join(*name.split("."))
        places = (os.path.join(folder, f"{inner}{end}") for folder in folders for end in (".py", "/__init__.py"))
        if file in places:
            found[f"module {name}"] = Path(file)
    return found


def _file(text: str) -> str | None:
    """The file that a text names: itself, `FILE?column=…` of prompts, or `FILE:NAME` of code."""
    places = (text, text.partition("?")[0], text.rpartition(":")[0])
    # Not `Path.is_file`, which raises for a text that is too long for a path.
    return next((place for place in places if os.path.isfile(place)), None)


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The dotted keys of a recipe that hold a text; entries of a list are counted from 0."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{path}.{key}" if path else str(key))
