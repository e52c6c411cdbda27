"""Reads a configuration that is a Python file of ml_collections, from its syntax tree. The file is never executed.

What a function assigns to keys is followed through literals, arithmetic, other functions of the file, and functions of
files beside it. Everything else is `Unread`: loops, conditions on something unknown, the environment, other modules.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .foreign_text import check_statements, read_source
from .python_values import STEPS, ConfigNode, PythonValues, Unread, shown

DEEPEST = 30
"""Largest number of functions that call each other."""
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


class ConfigReader:
    """Follows a function that makes a configuration.

    Args:
        path: the file of the function.
    """

    def __init__(self, path: Path) -> None:
        self.main = read_source_file(path)
        self._files = {path: self.main}
        self._steps = self._depth = 0
        self.variables: dict[str, Any] = {}
        """Variables of all functions that were followed."""

    def read(self, function: str) -> ConfigNode:
        """The configuration that a function of the file returns.

        Raises:
            ValueError: there is no such function, it returns no configuration, or it does too much to be followed.
        """
        if function not in self.main.functions:
            known = ", ".join(config_functions(self.main)) or "none"
            raise ValueError(f"{self.main.path} has no function {function!r}; functions of configurations: {known}")
        try:
            found = self._run(self.main, function)
        except RecursionError:
            raise self._too_much() from None
        if not isinstance(found, ConfigNode):
            raise ValueError(
                f"{self.main.path}: {function} returns no configuration that can be read without running it"
            )
        return found

    def count(self) -> None:
        """Count an expression or a statement; raises ValueError when there are too many."""
        self._steps += 1
        if self._steps > STEPS:
            raise self._too_much()

    def _too_much(self) -> ValueError:
        return ValueError(f"{self.main.path} does more than a configuration does; write the values out and try again")

    def _file(self, path: Path) -> SourceFile:
        if path not in self._files:
            self._files[path] = read_source_file(path)
        return self._files[path]

    def _run(self, file: SourceFile, function: str) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._too_much()
        frame = _Frame(self, file)
        found = frame.run(file.functions[function].body)
        self._depth -= 1
        # A function that calls another has the last word.
        self.variables |= frame.variables
        return found

    def called(self, file: SourceFile, node: ast.Call) -> Any:
        """The value of a call: a new section, a function of the file, or a function of a file beside it."""
        dotted = shown(node.func, 200)
        owner, _, name = dotted.rpartition(".")
        if name == "ConfigDict" or dotted == "dict":
            return None
        if node.args or node.keywords:
            return Unread(shown(node))
        if not owner and name in file.functions:
            return self._run(file, name)
        if not owner and name in file.borrowed:
            path, name = file.borrowed[name]
        else:
            path = file.siblings.get(owner.rpartition(".")[2], file.path)
        module = self._file(path)
        return self._run(module, name) if path != file.path and name in module.functions else Unread(shown(node))


class _Frame:
    """One call of a function: its variables, and what its statements do to them."""

    def __init__(self, reader: ConfigReader, file: SourceFile) -> None:
        self.reader, self.file = reader, file
        self.variables: dict[str, Any] = {}
        self.values = PythonValues(self._named, self._called, reader.count)

    def run(self, body: list[ast.stmt]) -> Any:
        """Follow statements; returns the value of the `return` that was reached, or None."""
        for statement in body:
            self.reader.count()
            if isinstance(statement, ast.Return):
                return None if statement.value is None else self.values.read(statement.value)
            inner = self._inner(statement)
            if inner is not None:
                if (found := self.run(inner)) is not None:
                    return found
            else:
                self._do(statement)
        return None

    def _inner(self, statement: ast.stmt) -> list[ast.stmt] | None:
        """The statements that a `with` or a decided `if` leads to; None for other statements."""
        if isinstance(statement, ast.With):
            return statement.body
        if isinstance(statement, ast.If):
            test = self.values.read(statement.test)
            if not isinstance(test, Unread | ConfigNode):
                return statement.body if test else statement.orelse
        return None

    def _do(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign):
            value = self.values.read(statement.value)
            for target in statement.targets:
                self._assign(target, value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, self.values.read(statement.value))
        elif isinstance(statement, ast.AugAssign):
            left = ast.copy_location(_loaded_again(statement.target), statement)
            made = ast.copy_location(ast.BinOp(left, statement.op, statement.value), statement)
            self._assign(statement.target, self.values.read(made))
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._update(statement.value)
        elif not isinstance(statement, ast.Expr | ast.Assert | ast.Pass | ast.Import | ast.ImportFrom):
            # A loop, or a condition on something unknown: what it assigns may be anything.
            for node in ast.walk(statement):
                self.reader.count()
                if isinstance(node, ast.Assign | ast.AugAssign):
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        self._assign(target, Unread(shown(node)))

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = value
        elif isinstance(target, ast.Attribute | ast.Subscript):
            owner = self.values.read(target.value)
            key = target.attr if isinstance(target, ast.Attribute) else self.values.read(target.slice)
            if isinstance(owner, ConfigNode) and isinstance(key, str):
                owner.put(key, value, self.file.path.name)
        elif isinstance(target, ast.Tuple | ast.List):
            alike = isinstance(value, list) and len(value) == len(target.elts)
            for number, entry in enumerate(target.elts):
                self._assign(entry, value[number] if alike else Unread(shown(target)))

    def _update(self, call: ast.Call) -> None:
        """`config.section.update({...})` and `update(key=value)`; other calls have no effect that is known."""
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "update"):
            return
        owner = self.values.read(call.func.value)
        if not isinstance(owner, ConfigNode):
            return
        for given in call.args:
            found = self.values.read(given)
            inner = found.values if isinstance(found, ConfigNode) else found
            for key, value in inner.items() if isinstance(inner, dict) else ():
                owner.put(str(key), value, self.file.path.name)
        for word in call.keywords:
            owner.put(str(word.arg), self.values.read(word.value), self.file.path.name)

    def _named(self, name: str) -> Any:
        if name in self.variables:
            return self.variables[name]
        if name in self.file.names:
            return self.values.read(self.file.names[name])
        return Unread(name)

    def _called(self, node: ast.Call) -> Any:
        found = self.reader.called(self.file, node)
        if found is not None:
            return found
        section = ConfigNode()
        for given in node.args:
            values = self.values.read(given)
            for key, value in values.items() if isinstance(values, dict) else ():
                section.put(str(key), value, self.file.path.name)
        for word in node.keywords:
            section.put(str(word.arg), self.values.read(word.value), self.file.path.name)
        return section


def _loaded_again(target: ast.expr) -> ast.expr:
    """The target of an assignment as an expression that is read."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    assert isinstance(target, ast.Subscript)
    return ast.Subscript(target.value, target.slice, ast.Load())
