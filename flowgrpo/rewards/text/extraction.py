"""The answer in a completion, the comparison of two answers, and the code in a fenced block.

Everything here reads text that a model wrote. The time grows linearly with the length of the text, nothing is
evaluated, and nothing recurses. This module imports nothing from the package, so that processes without torch can use
it.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

RULES = ("whole", "last_number", "marked")
# Longer numbers are compared as text: no dataset has them as answers, and exact arithmetic on them takes long.
LONGEST_NUMBER = 1000
LARGEST_EXPONENT = 1000

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"</?answer>")
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\u2212])?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?(?:/[0-9]+|\\?%)?"
)
_DECIMAL = re.compile(r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.[0-9]*)?(?:e([-+]?[0-9]{1,9}))?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}|\\[dt]?frac([0-9])([0-9])")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf)\{([^{}]*)\}")
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)


def final_answer(text: str, rule: str = "whole") -> str | None:
    r"""Return the final answer of a text.

    1. If there is a `\boxed{...}`, the content of the last one. Braces inside it are balanced; escaped braces do not
       count.
    2. Otherwise, if an answer tag was opened, the content of the last `<answer>...</answer>`.
    3. Otherwise, what the `rule` says.

    If the last box or tag is never closed, the text was cut off, and there is no answer.

    Args:
        text: a completion, of any length.
        rule: what counts as the answer in a text without box and tag. "whole": the whole text, so only a completion
            that contains nothing but the answer can be right. "last_number": the last number in the text. "marked":
            nothing.

    Returns:
        The answer without white space around it; None if there is none.
    """
    box = _last(_BOXED, text)
    if box is not None:
        return _filled(_balanced(text, box.end()))
    opened = text.rfind("<answer>")
    if opened >= 0:
        closed = _TAG.search(text, opened + len("<answer>"))
        return None if closed is None else _filled(text[opened + len("<answer>") : closed.start()])
    if rule == "whole":
        return _filled(text)
    number = _last(_NUMBER, text) if rule == "last_number" else None
    return None if number is None else number.group().rstrip(",")


def canonical(answer: str) -> Fraction | str:
    r"""Return what is compared of an answer: an exact number, or a text without the differences that do not count.

    Numbers are integers and decimals (also `.5` and `5.`). They may have a sign, commas between thousands, an
    exponent, or a percent sign (50% is 1/2). Fractions of two numbers, `1/2` or `\frac{1}{2}`, are numbers too. `0.50`,
    `1/2` and `50%` are equal, and leading zeros do not count. A number of more than 1000 characters, or with an
    exponent above 1000, is compared as text.

    In texts, the following differences do not count: case, the amount of white space, one final full stop, dollar
    signs and `\(...\)` around formulas, and `\text{...}` around the whole text.

    Args:
        answer: a text of any length.
    """
    text = _bare(answer)
    if len(text) > LONGEST_NUMBER:
        return text
    number = as_number(text)
    return text if number is None else number


def as_number(text: str) -> Fraction | None:
    """Return the exact number that a text represents, or None; see `canonical`.

    A text of more than 1000 characters gives None.
    """
    return None if len(text) > LONGEST_NUMBER else _number(text)


# Many completions have the same few answers, and a fraction takes longer to parse than to look up.
@lru_cache(maxsize=4096)
def _number(text: str) -> Fraction | None:
    text = text.strip().lower().replace("\u2212", "-").replace("{,}", ",").replace("\\!", "").replace("\\%", "%")
    sign, text = _signed(text)
    share = text.endswith("%")
    latex = _LATEX_FRACTION.fullmatch(text.removesuffix("%").strip())
    parts = [part for part in latex.groups() if part is not None] if latex else text.removesuffix("%").split("/")
    if len(parts) > 2:
        return None
    numbers = [_decimal(part.strip()) for part in parts]
    if None in numbers or numbers[1:] == [0]:
        return None
    value = Fraction(1)
    for number, power in zip(numbers, (1, -1)):
        value *= Fraction(number or 0) ** power
    return sign * value / (100 if share else 1)


def agreement(one: str, other: str) -> float:
    """Return the share of the characters of two answers that agree from the start and from the end, in [0, 1].

    With p the length of the common start, and s the length of the common end of the rest,

        agreement = (p + s) / length of the longer one

    Differences that do not count (`canonical`) are removed first. The share is 1 exactly if the texts are equal. It is
    2/3 for 123 and 124, 1/2 for 1000 and 10, and 0 if a text is empty.
    """
    first, second = (_spelt(_bare(answer)) for answer in (one, other))
    if not first or not second:
        return 0.0
    start = _common(first, second)
    end = _common(first[start:][::-1], second[start:][::-1])
    return (start + end) / max(len(first), len(second))


def fenced(text: str) -> str:
    """Return the content of the last fenced block (three backticks), or the whole text if there is no fenced block.

    A last block that is not closed was cut off. It counts only if it is the only block.
    """
    fences = list(_FENCE.finditer(text))
    if not fences:
        return text
    if len(fences) == 1:
        return text[fences[0].end() :].lstrip("\n")
    closing = len(fences) // 2 * 2 - 1
    return text[fences[closing - 1].end() : fences[closing].start()].lstrip("\n")


def matches(pattern: str, text: str) -> bool:
    """Whether a whole text matches a regular expression; `.` matches line ends too. This function may never return."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def _common(one: str, other: str) -> int:
    """Return the length of the common start of two texts."""
    return next((k for k, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _filled(text: str | None) -> str | None:
    return (text or "").strip() or None


def _balanced(text: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes the brace before it; None if there is no such brace."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if not depth:
            return text[start : brace.start()]
    return None


def _bare(answer: str) -> str:
    """Return an answer without the differences that do not count between texts."""
    text = " ".join(answer.split())
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = text.removeprefix("\\$").removeprefix("$").removesuffix(".").strip()
    wrapped = _WRAPPED.fullmatch(text)
    return (wrapped.group(1).strip() if wrapped else text).casefold()


def _spelt(text: str) -> str:
    """Return a whole number in digits alone, so that digits are compared with digits; return other texts unchanged."""
    number = as_number(text)
    return text if number is None or number.denominator > 1 else str(number.numerator)


def _signed(text: str) -> tuple[int, str]:
    signs = {"-": -1, "+": 1}
    return (signs[text[0]], text[1:].strip()) if text[:1] in signs else (1, text)


def _decimal(text: str) -> Fraction | None:
    sign, text = _signed(text)
    found = _DECIMAL.fullmatch(text)
    if found is None or not any(character.isdigit() for character in text.partition("e")[0]):
        return None
    if found.group(1) and abs(int(found.group(1))) > LARGEST_EXPONENT:
        return None
    return sign * Fraction(Decimal(text.replace(",", "")))
