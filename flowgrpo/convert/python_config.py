"""Reads a configuration that is a Python file of ml_collections, from its syntax tree. The file is never executed.

What a function assigns to keys is followed through literals, arithmetic, other functions of the file, and functions of
files beside it. Everything else is `Unread`: loops, conditions on something unknown, the environment, other modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .python_source import SourceFile, config_functions, read_source_file
from .python_values import STEPS, ConfigNode, PythonValues, Unread, shown

DEEPEST = 30
"""Largest number of functions that call each other."""
_READERS = ("print", "pprint", "len", "str", "repr", "dict", "list", "isinstance", "getattr", "hasattr", "info")
"""Functions that change no section which they get."""
_CHANGERS = ("update", "pop", "clear", "setdefault", "update_from_flattened_dict")
"""Methods that change their section."""


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

    def _run(self, file: SourceFile, function: str, given: Mapping[str, Any] | None = None) -> Any:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._too_much()
        frame = _Frame(self, file, given)
        found = frame.run(file.functions[function].body)
        self._depth -= 1
        # A function that calls another has the last word.
        self.variables |= frame.variables
        return found

    def follow(self, file: SourceFile, call: ast.Call, given: list[Any]) -> bool:
        """Follow a function of the file that gets these values by place; False if the call is not of this kind."""
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if call.keywords or name not in file.functions:
            return False
        own = file.functions[name].args
        names = [one.arg for one in (*own.posonlyargs, *own.args)]
        if own.vararg or own.kwonlyargs or own.kwarg or len(names) != len(given):
            return False
        self._run(file, name, dict(zip(names, given)))
        return True

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

    def __init__(self, reader: ConfigReader, file: SourceFile, given: Mapping[str, Any] | None = None) -> None:
        self.reader, self.file = reader, file
        self.variables: dict[str, Any] = dict(given or {})
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
            self._call(statement.value)
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                self._delete(target)
        elif not isinstance(statement, ast.Expr | ast.Assert | ast.Pass | ast.Import | ast.ImportFrom):
            # A loop, or a condition on something unknown: what it does may be done or not.
            for node in _within(statement):
                self.reader.count()
                self._perhaps(node)

    def _perhaps(self, node: ast.AST) -> None:
        """Doubt what a statement changes that may be reached or not.

        Raises:
            ValueError: it is a `return`, after which nothing would be known.
        """
        if isinstance(node, ast.Return):
            raise ValueError(
                f"{self.file.path}, line {node.lineno}: only a run of the file would show whether this `return` is "
                "reached; write the configuration without it and try again"
            )
        if isinstance(node, ast.Assign | ast.Delete):
            for target in node.targets:
                self._assign(target, Unread(shown(node)))
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            self._assign(node.target, Unread(shown(node)))
        elif isinstance(node, ast.Call):
            if (changes := self._changed(node)) is None:
                self._doubt_given(node)
                return
            owner, found = changes
            for key in found:
                owner.put(key, Unread(shown(node)), self.file.path.name)

    def _doubt(self, owner: ConfigNode, node: ast.AST) -> None:
        """Doubt all values of a section."""
        for key, value in list(owner.values.items()):
            if isinstance(value, ConfigNode):
                self._doubt(value, node)
            else:
                owner.put(key, Unread(shown(node)), self.file.path.name)

    def _doubt_given(self, call: ast.Call) -> None:
        """Doubt the sections that a call gets, unless the function only reads."""
        name = shown(call.func, 200).rpartition(".")[2]
        for given in (*call.args, *(word.value for word in call.keywords)):
            owner = self.values.read(given) if isinstance(given, ast.Name | ast.Attribute) else None
            if isinstance(owner, ConfigNode) and name not in _READERS:
                self._doubt(owner, call)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _CHANGERS:
            owner = self.values.read(call.func.value)
            if isinstance(owner, ConfigNode):
                self._doubt(owner, call)

    def _delete(self, target: ast.expr) -> None:
        if isinstance(target, ast.Attribute | ast.Subscript):
            owner = self.values.read(target.value)
            key = target.attr if isinstance(target, ast.Attribute) else self.values.read(target.slice)
            if isinstance(owner, ConfigNode) and isinstance(key, str):
                owner.values.pop(key, None)
            elif isinstance(owner, ConfigNode):
                self._doubt(owner, target)

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = value
        elif isinstance(target, ast.Attribute | ast.Subscript):
            owner = self.values.read(target.value)
            key = target.attr if isinstance(target, ast.Attribute) else self.values.read(target.slice)
            if isinstance(owner, ConfigNode) and isinstance(key, str):
                owner.put(key, value, self.file.path.name)
            elif isinstance(owner, ConfigNode):
                self._doubt(owner, target)
        elif isinstance(target, ast.Tuple | ast.List):
            alike = isinstance(value, list) and len(value) == len(target.elts)
            for number, entry in enumerate(target.elts):
                self._assign(entry, value[number] if alike else Unread(shown(target)))

    def _call(self, call: ast.Call) -> None:
        """A call that is a statement: `update`, `setattr`, or a function that may change the sections that it gets."""
        if (changes := self._changed(call)) is not None:
            owner, found = changes
            for key, value in found.items():
                owner.put(key, value, self.file.path.name)
            return
        given = [self.values.read(one) for one in call.args]
        sections = any(isinstance(one, ConfigNode) for one in given)
        if not (sections and self.reader.follow(self.file, call, given)):
            self._doubt_given(call)

    def _changed(self, call: ast.Call) -> tuple[ConfigNode, dict[str, Any]] | None:
        """The section and the values of `section.update({...})`, `update(key=value)` or `setattr`; None for others."""
        words: dict[str, Any] = {}
        if isinstance(call.func, ast.Name) and call.func.id == "setattr" and len(call.args) == 3:
            owner, key, value = (self.values.read(one) for one in call.args)
            return (owner, {key: value}) if isinstance(owner, ConfigNode) and isinstance(key, str) else None
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "update"):
            return None
        owner = self.values.read(call.func.value)
        if not isinstance(owner, ConfigNode):
            return None
        for given in call.args:
            found = self.values.read(given)
            inner = found.values if isinstance(found, ConfigNode) else found
            if not isinstance(inner, dict):
                return None
            words |= {str(key): value for key, value in inner.items()}
        for word in call.keywords:
            if word.arg is None:
                return None
            words[word.arg] = self.values.read(word.value)
        return owner, words

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


def _within(statement: ast.AST) -> Iterator[ast.AST]:
    """A statement and everything in it, without the bodies of functions and classes, which only calls would reach."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return
    yield statement
    for inner in ast.iter_child_nodes(statement):
        yield from _within(inner)


def _loaded_again(target: ast.expr) -> ast.expr:
    """The target of an assignment as an expression that is read."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    assert isinstance(target, ast.Subscript)
    return ast.Subscript(target.value, target.slice, ast.Load())
