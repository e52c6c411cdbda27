"""What a completion's answer is, and when two answers are the same; and the code in a fenced block.

Everything here reads text that a model wrote: time grows linearly with its length, nothing is evaluated, and nothing
recurses. It imports nothing of the package, so that processes without torch can use it.
"""

from __future__ import annotations

import re
from collections import deque
from decimal import Decimal
from fractions import Fraction

RULES = ("whole", "last_number", "marked")
# Longer ones are compared as text: no dataset asks for them, and exact arithmetic on them takes long.
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
    r"""The answer that a text ends in.

    1. The content of the last `\boxed{...}`, if there is any. Braces balance; escaped ones do not count.
    2. Otherwise what is inside of the last `<answer>...</answer>`, if an answer tag was opened.
    3. Otherwise by the `rule`.

    A last box or tag that is never closed was cut off, and gives no answer.

    Args:
        text: a completion, of any length.
        rule: what counts in a text without box and tag. "whole": all of it, so that only a completion that contains
            nothing but the answer can be right. "last_number": the last number in it. "marked": nothing.

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
    r"""What of an answer is compared: a number exactly, or a text without the differences that do not count.

    Numbers are integers, decimals (also `.5` and `5.`), with a sign, with commas between thousands, with an exponent,
    as a percentage (50% is 1/2), and as fractions of two such numbers, `1/2` or `\frac{1}{2}`. `0.50`, `1/2` and
    `50%` are equal, and leading zeros do not count. A number of more than 1000 characters, or with an exponent above
    1000, is text.

    Of texts, the case, the amount of white space, one final full stop, dollar signs and `\(...\)` around formulas,
    and `\text{...}` around all of it do not count.

    Args:
        answer: of any length.
    """
    text = _bare(answer)
    if len(text) > LONGEST_NUMBER:
        return text
    number = as_number(text)
    return text if number is None else number


def as_number(text: str) -> Fraction | None:
    """The number that a text is, exactly, or None; see `canonical`. A text of more than 1000 characters is none."""
    if len(text) > LONGEST_NUMBER:
        return None
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
    """The share of two answers' characters that agree from the start and from the end, in [0, 1].

    With p the length of their common start and s that of the common end of what remains,

        agreement = (p + s) / length of the longer one

    after the differences that do not count were removed (`canonical`). 1 exactly for equal texts; 123 and 124 have
    2/3, 1000 and 10 have 1/2, and an empty text has 0.
    """
    first, second = (_spelt(_bare(answer)) for answer in (one, other))
    if not first or not second:
        return 0.0
    start = _common(first, second)
    end = _common(first[start:][::-1], second[start:][::-1])
    return (start + end) / max(len(first), len(second))


def fenced(text: str) -> str:
    """The content of the last fenced block (three backticks), or the whole text if there is none.

    A last block that is not closed counts only if it is the only one: it was cut off.
    """
    fences = list(_FENCE.finditer(text))
    if not fences:
        return text
    if len(fences) == 1:
        return text[fences[0].end() :].lstrip("\n")
    closing = len(fences) // 2 * 2 - 1
    return text[fences[closing - 1].end() : fences[closing].start()].lstrip("\n")


def matches(pattern: str, text: str) -> bool:
    """Whether a whole text matches a regular expression; `.` matches line ends too. May take for ever."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def _common(one: str, other: str) -> int:
    """The length of the common start of two texts."""
    return next((k for k, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _filled(text: str | None) -> str | None:
    return (text or "").strip() or None


def _balanced(text: str, start: int) -> str | None:
    """The text from `start` to the brace that closes the one before it; None if there is no such brace."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if not depth:
            return text[start : brace.start()]
    return None


def _bare(answer: str) -> str:
    """An answer without the differences that do not count between texts."""
    text = " ".join(answer.split())
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = text.removeprefix("\\$").removeprefix("$").removesuffix(".").strip()
    wrapped = _WRAPPED.fullmatch(text)
    return (wrapped.group(1).strip() if wrapped else text).casefold()


def _spelt(text: str) -> str:
    """A whole number in digits alone, so that digits are compared with digits; other texts as they are."""
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
