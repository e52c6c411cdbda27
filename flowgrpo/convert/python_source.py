"""What a Python file of configurations holds: its functions, its names, and the files beside it that it uses."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from .foreign_text import check_statements, read_source
from .python_values import shown

_LOADERS = ("load_source", "spec_from_file_location", "module_from_spec", "import_module")
_FILE = re.compile(r"([A-Za-z_]\w*)\.py$")


@dataclass
class SourceFile:
    """A Python file: its functions, and its names that stand for files beside it.

    Attributes:
        path: of the file.
        functions: by name.
        siblings: name -> file beside this one.
        names: other names of the module that are given a value.
    """

    path: Path
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    siblings: dict[str, Path] = field(default_factory=dict)
    names: dict[str, ast.expr] = field(default_factory=dict)
    borrowed: dict[str, tuple[Path, str]] = field(default_factory=dict)


def read_source_file(path: Path) -> SourceFile:
    """Parse a file.

    Raises:
        ValueError: the file cannot be read, is no Python, or is too deep.
    """
    text = read_source(path)
    check_statements(path, text)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: this is not Python: {error.msg}") from None
    except (RecursionError, MemoryError, ValueError):
        raise ValueError(f"{path} cannot be parsed as Python; look where the file comes from") from None
    found = SourceFile(path)
    for statement in tree.body:
        _note(found, statement)
    return found


def _note(file: SourceFile, statement: ast.stmt) -> None:
    if isinstance(statement, ast.FunctionDef):
        file.functions[statement.name] = statement
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            _sibling(file, alias.asname or alias.name.partition(".")[0], alias.name.rpartition(".")[2])
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            name = alias.asname or alias.name
            _sibling(file, name, alias.name)
            module = beside(file.path, (statement.module or "").rpartition(".")[2])
            if module is not None and name not in file.siblings:
                file.borrowed[name] = (module, alias.name)
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Name):
            file.names[target.id] = value
            if isinstance(value, ast.Call) and shown(value.func, 200).rpartition(".")[2] in _LOADERS:
                _loaded(file, target.id, value)


def _loaded(file: SourceFile, name: str, call: ast.Call) -> None:
    """A module that is loaded from a path: the name of the path's file, or the module of the spec that is given."""
    for node in ast.walk(call):
        if isinstance(node, ast.Name) and node.id in file.siblings:
            file.siblings[name] = file.siblings[node.id]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = _FILE.search(node.value)
            _sibling(file, name, words[1] if words else node.value.rpartition(".")[2])


def _sibling(file: SourceFile, name: str, module: str) -> None:
    found = beside(file.path, module)
    if found is not None:
        file.siblings[name] = found


def beside(path: Path, module: str) -> Path | None:
    """The file of a module in the folder of another file; None if there is none there, or it is a link out of it."""
    if not re.fullmatch(r"[A-Za-z_]\w*", module):
        return None
    found = path.parent / f"{module}.py"
    inside = found.is_file() and found.resolve().parent == path.parent.resolve()
    return found if inside and found.resolve() != path.resolve() else None


def config_functions(file: SourceFile) -> list[str]:
    """Names of functions that can give a configuration: they take no argument, and return something."""
    return [
        name
        for name, function in file.functions.items()
        if not (function.args.posonlyargs or function.args.args or function.args.kwonlyargs)
        and any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function))
    ]
