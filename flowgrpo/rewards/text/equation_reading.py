"""The equations of arithmetic in a text that a model wrote, and whether each holds.

The time grows linearly with the length of the text, numbers are exact and bounded, and Python evaluates nothing.
Anything that may be algebra, a mixed number or a part of something else is ignored. So only what is certainly an
equation can be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

LONGEST = 500
DEEPEST = 50
LARGEST_BITS = 8192

_PLAIN = [
    (re.compile(pattern, re.MULTILINE), plain)
    for pattern, plain in (
        (r"\\\\", "\n"),
        (r"\\(?:times|cdot|ast)\b|[×·⋅∙]", "*"),
        (r"\\div\b|÷", "/"),
        (r"\\approx\b", "≈"),
        (r"\{,\}", ","),
        (r"\\[()\[\]]|\\q?quad\b", " "),
        (r"\\(?:left|right|displaystyle)\b|\\[,;!: ]|[&$€£]|\\(?=%)", ""),
        (r"\\(?:text|textbf|textrm|mathrm|mathbf|boxed)\{([^{}]*)\}", r"\1"),
        (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))"),
        (r"\\boxed\{([^{}]*)\}", r"\1"),
        (r"\^\{([^{}]*)\}", r"^(\1)"),
        (r"[−–]", "-"),
        (r"==+", "="),
        (r"(?<=[0-9)])\s*[xX]\s*(?=[0-9(])", "*"),
        (r"(?<=[0-9)])\*\*(?=[0-9(])", "^"),
        (r"\*\*", ""),
        # The bullets and numbers of a list are neither signs nor operands.
        (r"^[ \t]*(?:[-*+•] +|\(?[0-9]{1,3}[.)] +)", ""),
    )
]
_TOKEN = re.compile(
    r"(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<sign>[-+*/^()%=≈])|(?P<space>[ \t]+)|(?P<other>.)",
    re.DOTALL,
)
RELATIONS = ("=", "≈")


class _Undefined(ArithmeticError):
    """An expression has no value, or its value is too large to compare."""


class _Unreadable(ValueError):
    """The tokens are not an expression of numbers."""


@dataclass(frozen=True)
class Equation:
    """An equation as it was read, and whether it holds."""

    text: str
    holds: bool


@dataclass(frozen=True)
class _Token:
    """A number, a sign or a bracket, and its place in the text."""

    text: str
    start: int
    end: int
    number: bool


Tokens = Sequence[_Token]


def equations(text: str, decimals: int = 2) -> list[Equation]:
    """Return the equations in a text, in their order.

    An equation has two expressions, one on each side of an equals sign or ≈. An expression consists of numbers,
    `+ - * / ^ %` and brackets, and at least one of the two has an operation. LaTeX, × ÷ ·, and `x` between numbers are
    read too. A unit may follow the equation. In `a = b = c`, each equals sign belongs to an equation of its own. An
    expression that touches a letter, as in algebra, is not part of an equation. Two identical sides are not an
    equation.

    An equation holds if its sides are equal, or if one side is a number to which the other side rounds. With an equals
    sign, the number must have at least `decimals` decimal places. With ≈, the digits of the number count. An equation
    does not hold if a side has no value (a division by 0) or a huge value, or if the equation has more than 500
    characters.

    Args:
        text: a text of any length.
        decimals: smallest number of decimal places of a rounded result.
    """
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    return [found for run in _runs(text) for found in _equations_of(text, run, decimals)]


def _runs(text: str) -> Iterator[list[_Token]]:
    """Yield the longest stretches that consist only of numbers, signs and spaces."""
    run: list[_Token] = []
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "other":
            yield run
            run = []
        elif match.lastgroup != "space":
            run.append(_Token(match.group(), match.start(), match.end(), match.lastgroup == "number"))
    yield run


def _equations_of(text: str, run: Tokens, decimals: int) -> Iterator[Equation]:
    places = [k for k, token in enumerate(run) if token.text in RELATIONS]
    bounds = [-1, *places, len(run)]
    sides = [_expressions(run[one + 1 : other]) for one, other in pairwise(bounds)]
    for k, place in enumerate(places):
        left, right = sides[k], sides[k + 1]
        if not left or not right or _mixed(left[-2:]) or _mixed(right[:2]):
            continue
        first, last = left[-1], right[0]
        if (first[0] is run[0] and _continues(text, run[0])) or (last[-1] is run[-1] and _goes_on(text, run[-1])):
            continue
        if _same(first, last) or not (_worked(first) or _worked(last)):
            continue
        words = text[first[0].start : last[-1].end]
        try:
            yield Equation(words, len(words) <= LONGEST and _holds(first, last, run[place].text, decimals))
        except _Undefined:
            yield Equation(words, False)
        except _Unreadable:
            continue


# -- where an expression begins and ends ---------------------------------------------------------------------------


def _expressions(side: Tokens) -> list[list[_Token]]:
    """Return the expressions that follow one another on a side of an equation, separated where two operands meet.

    A bracket without its partner belongs to the surrounding text, and ends an expression too.
    """
    alone, opened = set[int](), list[int]()
    for k, token in enumerate(side):
        if token.text == "(":
            opened.append(k)
        elif token.text == ")" and opened:
            opened.pop()
        elif token.text == ")":
            alone.add(k)
    alone.update(opened)
    found: list[list[_Token]] = [[]]
    depth = 0
    for k, token in enumerate(side):
        if k in alone:
            found.append([])
            continue
        before = found[-1][-1] if found[-1] else None
        operand = before is not None and (before.number or before.text in ")%")
        apart = token.number or (token.text == "(" and before is not None and before.end < token.start)
        if operand and apart and depth == 0:
            found.append([])
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        found[-1].append(token)
    return [tokens for tokens in found if tokens]


def _mixed(two: Sequence[Tokens]) -> bool:
    """Whether two neighbouring expressions may be a mixed number, such as `1 1/2`."""
    if len(two) < 2:
        return False
    whole, rest = two
    fraction = [token.text for token in rest[:3]]
    return whole[-1].number and len(fraction) == 3 and fraction[1] == "/" and all(t.isdigit() for t in fraction[::2])


def _continues(text: str, token: _Token) -> bool:
    """Whether the first token of a stretch belongs to text before the stretch."""
    before = text[max(token.start - LONGEST, 0) : token.start]
    near = before[-1:]
    if near.isalnum() or near in ("_", "√") or (near in (".", ",") and before[-2:-1].isdigit()):
        return True
    if token.number or token.text == "(":
        return False
    line = before.rpartition("\n")[2].rstrip()
    return token.text not in "-+" or bool(line and line[-1] not in ":;,.([{<>→⇒|`\"'#")


def _goes_on(text: str, token: _Token) -> bool:
    """Whether the last token does not end an expression: it is a sign, or a number to which the next text belongs."""
    if token.text in "-+*/^(":
        return True
    after = text[token.end : token.end + 2]
    near, next_one = after[:1], after[1:]
    if near.isalpha():
        return not next_one.isalpha()
    return near.isnumeric() or near in ("_", "!", "√") or (near in (".", ",", ":") and next_one.isdigit())


def _worked(tokens: Tokens) -> bool:
    return sum(token.number for token in tokens) > 1 or any(token.text == "%" for token in tokens)


def _same(one: Tokens, other: Tokens) -> bool:
    bare = [[token.text for token in tokens if token.text not in "()"] for tokens in (one, other)]
    return bare[0] == bare[1]


# -- the value of an expression ------------------------------------------------------------------------------------


def _holds(first: Tokens, last: Tokens, relation: str, decimals: int) -> bool:
    values = [_value(tokens) for tokens in (first, last)]
    if values[0] == values[1]:
        return True
    pairs = ((first, values[0], values[1]), (last, values[1], values[0]))
    return any(_rounded(tokens, own, exact, relation, decimals) for tokens, own, exact in pairs)


def _rounded(tokens: Tokens, number: Fraction, exact: Fraction, relation: str, decimals: int) -> bool:
    """Whether a side is a single number to which the other side rounds."""
    if _worked(tokens) or number == 0:
        return False
    [digits] = [token.text for token in tokens if token.number]
    whole, point, behind = digits.partition(".")
    places = len(behind) if point else len(whole.rstrip("0")) - len(whole)
    if relation == "=" and (places < decimals or not point):
        return False
    return abs(exact - number) <= Fraction(10) ** -places / 2


def _value(tokens: Tokens) -> Fraction:
    value, end = _sum(tokens, 0, 0)
    if end != len(tokens):
        raise _Unreadable
    return value


def _sum(tokens: Tokens, k: int, depth: int) -> tuple[Fraction, int]:
    value, k = _product(tokens, k, depth)
    while k < len(tokens) and tokens[k].text in "+-":
        sign = tokens[k].text
        other, k = _product(tokens, k + 1, depth)
        value = _bounded(value + other if sign == "+" else value - other)
    return value, k


def _product(tokens: Tokens, k: int, depth: int) -> tuple[Fraction, int]:
    value, k = _factor(tokens, k, depth)
    while k < len(tokens) and tokens[k].text in "*/(":
        sign = tokens[k].text
        other, k = _factor(tokens, k if sign == "(" else k + 1, depth)
        if sign == "/" and other == 0:
            raise _Undefined
        value = _bounded(value / other if sign == "/" else value * other)
    return value, k


def _factor(tokens: Tokens, k: int, depth: int) -> tuple[Fraction, int]:
    if depth > DEEPEST:
        raise _Undefined
    if k < len(tokens) and tokens[k].text in "-+":
        value, after = _factor(tokens, k + 1, depth + 1)
        return (-value if tokens[k].text == "-" else value), after
    value, k = _operand(tokens, k, depth)
    while k < len(tokens) and tokens[k].text == "%":
        value, k = value / 100, k + 1
    if k < len(tokens) and tokens[k].text == "^":
        exponent, k = _factor(tokens, k + 1, depth + 1)
        value = _power(value, exponent)
    return value, k


def _operand(tokens: Tokens, k: int, depth: int) -> tuple[Fraction, int]:
    if k == len(tokens):
        raise _Unreadable
    token = tokens[k]
    if token.number:
        if len(token.text) > LONGEST:
            raise _Undefined
        return _bounded(Fraction(Decimal(token.text.replace(",", "")))), k + 1
    if token.text != "(":
        raise _Unreadable
    value, k = _sum(tokens, k + 1, depth + 1)
    if k == len(tokens) or tokens[k].text != ")":
        raise _Unreadable
    return value, k + 1


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _Unreadable
    size = max(base.numerator.bit_length(), base.denominator.bit_length(), 2)
    if abs(exponent) * size > LARGEST_BITS or (base == 0 and exponent < 0):
        raise _Undefined
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
        raise _Undefined
    return value
