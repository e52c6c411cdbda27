"""Arithmetic within bounds, as prompt files and policies write it. Python only reads the syntax, and never runs it."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any

LONGEST, LARGEST_BITS, LARGEST_POWER = 300, 4096, 64
Variables = Mapping[str, Fraction | int | str]

_TWO: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_ONE: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_COMPARED: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_CALLED: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max}


def written_value(text: str, variables: Variables) -> str:
    """The value of an expression as a text: `7`, `7/2`, `yes`, `no`, or the text that it is; see `value_of`."""
    value = value_of(text, variables)
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def value_of(text: str, variables: Variables) -> Fraction | bool | str:
    """The exact value of an expression.

    An expression has numbers, variables, `+ - * / // % **`, brackets, comparisons, `and`, `or`, `not`, and the
    functions `abs`, `min` and `max`. A text can only be compared, with `==` and `!=`. A decimal is exact if
    it has at most 15 digits.

    Args:
        text: the expression, of at most 300 characters.
        variables: name -> value.

    Raises:
        ValueError: the text is no such expression, has no value (a division by 0), or a value that is too large.
    """
    if len(text) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters, and {text[:40]!r}... has {len(text)}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, variables)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no expression; write arithmetic, such as (a + b) * 2") from None
    except ZeroDivisionError:
        raise ValueError(f"{text!r} divides by 0") from None
    except TypeError:
        raise ValueError(f"{text!r} calculates with a text or a comparison; calculate with numbers") from None


def _value(node: ast.expr, variables: Variables) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, str) and node.value != math.inf:
        return node.value if isinstance(node.value, str) else _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.Name):
        if node.id not in variables:
            raise ValueError(f"there is no variable {node.id!r}; the variables are {', '.join(variables) or 'none'}")
        value = variables[node.id]
        return value if isinstance(value, str) else Fraction(value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ONE:
        return _ONE[type(node.op)](_number(_value(node.operand, variables)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _value(node.operand, variables)
    if isinstance(node, ast.BinOp) and type(node.op) in _TWO:
        left, right = (_number(_value(side, variables)) for side in (node.left, node.right))
        if isinstance(node.op, ast.Pow) and (right.denominator > 1 or abs(right) > LARGEST_POWER):
            raise ValueError(f"a power is a whole number from -{LARGEST_POWER} to {LARGEST_POWER}, not {right}")
        return _bounded(Fraction(_TWO[type(node.op)](left, right)))
    if isinstance(node, ast.BoolOp):
        found = [bool(_value(one, variables)) for one in node.values]
        return all(found) if isinstance(node.op, ast.And) else any(found)
    if isinstance(node, ast.Compare) and all(type(one) in _COMPARED for one in node.ops):
        sides = [_value(side, variables) for side in (node.left, *node.comparators)]
        return all(_COMPARED[type(one)](*pair) for one, pair in zip(node.ops, pairwise(sides)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLED and not node.keywords:
        return _CALLED[node.func.id](*(_number(_value(one, variables)) for one in node.args))
    raise ValueError(
        f"{ast.unparse(node)!r:.80} is no arithmetic; write numbers, variables, + - * / // % **, abs, min, max"
    )


def _number(value: Any) -> Fraction:
    if not isinstance(value, Fraction):
        raise TypeError
    return value


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise ValueError(f"a number is larger than 2**{LARGEST_BITS}; write smaller ranges or powers")
    return value
