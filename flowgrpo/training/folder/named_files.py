"""The files that a recipe names: prompts, code of rewards and parts, a LoRA to start from, teachers. Have they changed?

A run goes on to the same numbers only if it reads the same files again. So a checkpoint holds their sizes and checksums
from the start of the process that wrote it, because a run does not read them again later. Code may import modules that
lie beside it, or in its package. Those count as well, also if a function imports them only when it is called. A module
of this kind is measured for the first checkpoint after its import.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configs.yaml_text import parse_yaml
from ...parts.foreign import is_own
from ...parts.kinds import KINDS
from ...parts.plugins import entry_points, source_of
from ...weights.pipeline_folders import DENOISERS
from .checkpoint import inputs_before, measured
from .leftovers import RESULTS

_UNREAD = "data.test"
"""No run reads this file, not even for a checksum."""
_OURS = __name__.partition(".")[0]
"""This package, whose folder may be the folder of a reward."""
_WEIGHTS = re.compile(r"model\.(lora\.start|teachers\.\d+\.(lora|path))")
"""Keys that name weights, which may be a folder."""
_MODULE = "module "
"""Beginning of the key of a module that other code has imported."""


def measured_inputs(recipe: str) -> dict[str, Any]:
    """Size and checksum of each file that a recipe names, by the key that names it, such as `rewards.0.name`.

    A module that the code of the recipe has imported from its own folder or package has the key `module NAME`. The
    weights of a LoRA to start from and of a teacher may be a folder or a run; their files have keys such as
    `model.teachers.0.path/transformer/NAME`. Other folders, and files that cannot be read, are left out.

    Args:
        recipe: the recipe, as YAML.
    """
    named = _Named.of(recipe)
    return _measured({**named.files, **named.imported()})


def with_later_imports(recipe: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a run, together with the modules that its code has imported since they were measured.

    Args:
        recipe: the recipe, as YAML.
        inputs: `measured_inputs` of the recipe, or what this function returned before.
    """
    later = {key: file for key, file in _Named.of(recipe).imported().items() if key not in inputs}
    return {**inputs, **_measured(later)}


def changed_inputs(recipe: str, inputs: Mapping[str, Any], checkpoint: Path) -> Iterator[str]:
    """A sentence on the files that are no longer what they were for a checkpoint; nothing if they all are.

    A key that the checkpoint lacks says nothing. A module that this process has not imported yet is looked up.

    Args:
        recipe: the recipe, as YAML.
        inputs: `measured_inputs` of the recipe.
        checkpoint: the checkpoint from which the run goes on.
    """
    before = inputs_before(checkpoint)
    named = _Named.of(recipe)
    files = {**named.files, **named.imported()}
    later = {key: file for key in before if key not in inputs and (file := named.file_of(key)) is not None}
    files |= later
    changed: dict[Path, list[str]] = {}
    for key, content in {**inputs, **_measured(later)}.items():
        if key in before and before[key] != content:
            changed.setdefault(files[key], []).append(key)
    if changed:
        listed = ", ".join(f"{file} ({', '.join(keys)})" for file, keys in changed.items())
        yield (
            f"the run of {checkpoint.name} read other contents of {listed}; it goes on with what is there now, so its "
            "numbers are not those of an uninterrupted run"
        )


def _measured(files: Mapping[str, Path]) -> dict[str, Any]:
    found = {}
    for key, file in files.items():
        try:
            found[key] = measured(file)
        except OSError:
            # What needs the file says why it cannot be read.
            continue
    return found


@dataclass(frozen=True)
class _Named:
    """What a recipe names.

    Attributes:
        files: the key of the recipe -> the file that it names, or the file of the module that it names.
        folders: folders of code that is named as a file.
        packages: top-level packages of code that is named as a module, or that an installed package declares.
    """

    files: Mapping[str, Path]
    folders: frozenset[str]
    packages: frozenset[str]

    @classmethod
    def of(cls, recipe: str) -> _Named:
        """What a recipe names.

        Args:
            recipe: the recipe, as YAML.
        """
        points = {
            point.name: point.module for point in entry_points("flowgrpo.rewards", *(k.group for k in KINDS.values()))
        }
        files, folders, packages = dict[str, Path](), set[str](), set[str]()
        for key, text in _texts(parse_yaml(recipe, "the recipe of the run")):
            if key == _UNREAD:
                continue
            if (named := _file(text)) is not None:
                files[key] = Path(named)
                if named.endswith(".py"):
                    folders.add(str(Path(named).resolve().parent))
            elif _WEIGHTS.fullmatch(key):
                files |= {f"{key}/{name}": file for name, file in _weights_in(Path(text)).items()}
            elif (module := _module(text, points)) is not None and (file := _file_of(module)) is not None:
                files[key] = Path(file)
                packages.add(module.partition(".")[0])
        return cls(files, frozenset(folders), frozenset(packages))

    def imported(self) -> dict[str, Path]:
        """The imported modules that lie in these folders and packages, by `module NAME`.

        In a folder, the place of a module's file follows from its name. Packages that are installed below a folder have
        other places. In a package, modules of a library do not count: its version stands for them.
        """
        found = dict[str, Path]()
        if not (self.folders or self.packages):
            return found  # A run has thousands of modules.
        for name in list(sys.modules):
            file = _file_of(name)
            if file is None:
                continue
            packaged = (
                name.partition(".")[0] in self.packages and is_own(file) and Path(file) not in self.files.values()
            )
            if packaged or file in self._places(name):
                found[f"{_MODULE}{name}"] = Path(file)
        return found

    def file_of(self, key: str) -> Path | None:
        """The file that `module NAME` would be imported from; None for another key, and for code of another recipe."""
        if not key.startswith(_MODULE):
            return None
        name = key.removeprefix(_MODULE)
        if name.partition(".")[0] in self.packages:
            return source_of(f"{name}:")
        return next((Path(place) for place in self._places(name) if os.path.isfile(place)), None)

    def _places(self, name: str) -> Iterator[str]:
        inner = os.path.join(*name.split("."))
        return (os.path.join(folder, f"{inner}{end}") for folder in self.folders for end in (".py", "/__init__.py"))


def _module(text: str, points: Mapping[str, str]) -> str | None:
    """The module of `package.module:NAME`, or of a name that an installed package declares; None for any other text.

    A run has made its rewards and parts before. So a module that is not imported is not used.
    """
    location, _, name = text.rpartition(":")
    module = location if name.isidentifier() else ""
    module = module or points.get(text, "")
    top = module.partition(".")[0]
    return module if module in sys.modules and top not in {_OURS, *sys.stdlib_module_names} else None


def _file_of(module: str) -> str | None:
    """The file of an imported module; None for one of this package, and for one without a file."""
    file = getattr(sys.modules.get(module), "__dict__", {}).get("__file__")
    return file if isinstance(file, str) and module.partition(".")[0] != _OURS else None


def _file(text: str) -> str | None:
    """The file that a text names: itself, `FILE?column=…` of prompts, or `FILE:NAME` of code."""
    places = (text, text.partition("?")[0], text.rpartition(":")[0])
    # Not `Path.is_file`, which raises for a text that is too long for a path.
    return next((place for place in places if os.path.isfile(place)), None)


def _weights_in(folder: Path) -> dict[str, Path]:
    """The files of weights of a folder, by path within it: of a LoRA or a model, of denoisers, or of a run's result."""
    if (folder / "config.yaml").is_file():
        results = (folder / name for name in RESULTS)
        folder = next((result for result in results if result.is_dir()), folder)
    places = (folder, *(folder / name for name in DENOISERS))
    found = sorted(file for place in places for file in place.glob("*.safetensors"))
    return {str(file.relative_to(folder)): file for file in found}


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The dotted keys of a recipe that hold a text; entries of a list are counted from 0."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, f"{path}.{key}" if path else str(key))
