"""Values of Python expressions, read from the syntax tree: literals, simple arithmetic, paths. Nothing is executed."""

from __future__ import annotations

import ast
import operator
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LARGEST = 10**15
"""Largest absolute value of a number in arithmetic."""
LONGEST = 10_000
"""Largest number of characters of a text, and of entries of a list."""
STEPS = 100_000
"""Largest number of expressions and statements that are read for one configuration."""


@dataclass(frozen=True)
class Unread:
    """A value that only a run of the code would show.

    Attributes:
        text: the expression, shortened.
    """

    text: str

    def __repr__(self) -> str:
        return f"`{self.text}`"


@dataclass
class ConfigNode:
    """A section of a configuration: keys that were assigned, and the file in which each was last assigned."""

    values: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, file: str) -> None:
        """Assign a key."""
        self.values[key], self.files[key] = value, file

    def flat(self, keep: frozenset[str], prefix: str = "") -> tuple[dict[str, Any], dict[str, str]]:
        """Dotted keys -> values, and dotted keys -> files; sections named in `keep` stay mappings."""
        values: dict[str, Any] = {}
        files: dict[str, str] = {}
        for key, value in self.values.items():
            if isinstance(value, ConfigNode) and prefix + key not in keep:
                inner = value.flat(keep, f"{prefix}{key}.")
                values |= inner[0]
                files |= inner[1]
            else:
                values[prefix + key] = dict(value.values) if isinstance(value, ConfigNode) else value
                files[prefix + key] = self.files.get(key, "")
        return values, files


Lookup = Callable[[str], Any]
Call = Callable[[ast.Call], Any]


def _within(value: Any) -> bool:
    if isinstance(value, int | float):
        return abs(value) <= LARGEST
    return not isinstance(value, str | list | tuple) or len(value) <= LONGEST


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > 64 or abs(base) > 10**6:
        raise OverflowError
    return base**exponent


NUMBERS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda one, other: one is other,
    ast.IsNot: lambda one, other: one is not other,
}
BUILTINS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "round": round,
    "abs": abs,
    "min": min,
    "max": max,
}


class PythonValues:
    """Reads expressions. Names and calls are looked up by functions of the reader of the file.

    Args:
        name: gives the value of a name; `Unread` if it is not known.
        call: gives the value of a call that is no builtin one.
        count: called for each expression; raises ValueError when there are too many.
    """

    def __init__(self, name: Lookup, call: Call, count: Callable[[], None]) -> None:
        self.name, self.call, self.count = name, call, count

    def read(self, node: ast.expr) -> Any:
        """The value of an expression; `Unread` if only a run would show it."""
        self.count()
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        try:
            value = Unread(shown(node)) if method is None else method(node)
            return value if _within(value) else Unread(shown(node))
        except (TypeError, ArithmeticError, LookupError, AttributeError):
            return Unread(shown(node))

    def _constant(self, node: ast.Constant) -> Any:
        return node.value if isinstance(node.value, str | int | float | bool | None) else Unread(shown(node))

    def _name(self, node: ast.Name) -> Any:
        return self.name(node.id)

    def _attribute(self, node: ast.Attribute) -> Any:
        owner = self.read(node.value)
        return owner.values[node.attr] if isinstance(owner, ConfigNode) else Unread(shown(node))

    def _subscript(self, node: ast.Subscript) -> Any:
        owner, key = self.read(node.value), self.read(node.slice)
        if isinstance(owner, ConfigNode):
            return owner.values[key]
        return owner[key] if isinstance(owner, dict | list | tuple) else Unread(shown(node))

    def _list(self, node: ast.List) -> Any:
        return self._all(node, [self.read(entry) for entry in node.elts])

    def _tuple(self, node: ast.Tuple) -> Any:
        return self._all(node, [self.read(entry) for entry in node.elts])

    def _dict(self, node: ast.Dict) -> Any:
        keys = [Unread("**") if key is None else self.read(key) for key in node.keys]
        values = [self.read(value) for value in node.values]
        self._plain(*keys)
        return dict(zip(keys, values, strict=True))

    def _all(self, node: ast.expr, values: list[Any]) -> Any:
        return Unread(shown(node)) if any(isinstance(value, Unread) for value in values) else values

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self._plain(self.read(node.operand))[0]
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) else +value

    def _binop(self, node: ast.BinOp) -> Any:
        left, right = self._plain(self.read(node.left), self.read(node.right))
        numbers = all(isinstance(value, int | float) for value in (left, right))
        if numbers or (isinstance(node.op, ast.Add) and isinstance(left, str) and isinstance(right, str)):
            return NUMBERS[type(node.op)](left, right)
        raise TypeError

    def _boolop(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for part in node.values:
            value = self._plain(self.read(part))[0]
            if bool(value) == isinstance(node.op, ast.Or):
                break
        return value

    def _compare(self, node: ast.Compare) -> Any:
        values = self._plain(self.read(node.left), *map(self.read, node.comparators))
        pairs = zip(node.ops, values, values[1:])
        return all(COMPARISONS[type(op)](left, right) for op, left, right in pairs)

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.read(node.body if self._plain(self.read(node.test))[0] else node.orelse)

    def _joinedstr(self, node: ast.JoinedStr) -> Any:
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                if part.format_spec is not None or part.conversion != -1:
                    raise TypeError
                parts.append(str(self._plain(self.read(part.value))[0]))
            else:
                parts.append(str(self.read(part)))
        return "".join(parts)

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Name) and node.func.id in BUILTINS and not node.keywords:
            given = self._plain(*map(self.read, node.args))
            try:
                return BUILTINS[node.func.id](*given)
            except ValueError as error:
                raise TypeError from error
        dotted = shown(node.func)
        if dotted in ("os.getcwd", "os.path.dirname") or dotted.endswith("path.dirname"):
            # The folder from which the other tool was started, or the folder of its file: paths begin there.
            return ""
        if dotted == "os.path.join" and not node.keywords:
            parts = self._plain(*map(self.read, node.args))
            return posixpath.join(*parts)
        return self.call(node)

    @staticmethod
    def _plain(*values: Any) -> tuple[Any, ...]:
        if any(isinstance(value, Unread | ConfigNode) for value in values):
            raise TypeError
        return values


def shown(node: ast.AST, most: int = 60) -> str:
    """An expression as text, shortened."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "an expression"
    return text if len(text) <= most else f"{text[:most]} …"
