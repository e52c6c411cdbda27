"""The tools that a form with turns chooses by name: a tool answers the calls that a policy writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from ....parts.ranges import Count

if TYPE_CHECKING:
    from ...data import PromptRow

ERROR = "error"
_PROBLEM = re.compile(r"-?\d+(?:[-+*]-?\d+)*")
_TERM = re.compile(r"([-+]?)((?:-?\d+)(?:\*-?\d+)*)")


def calculator(call: str, row: PromptRow, *, digits: Count = 30) -> str:
    """The value of whole numbers joined by `+`, `-` and `*`; `error` if the call is nothing of this kind.

    A call without text is about the prompt, whose `=` and white space do not count.

    Args:
        call: the text of the call.
        row: the prompt.
        digits: the most characters of a call, so that no call takes long.
    """
    text = "".join((call.strip() or row.text).split()).removesuffix("=")
    if len(text) > digits or not _PROBLEM.fullmatch(text):
        return ERROR
    total = 0
    for sign, product in _TERM.findall(text):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return str(total)


TOOLS: dict[str, Callable[..., str]] = {"calculator": calculator}
"""`tool(call, row, *, ...) -> text`: the answer to the text of a call, for a prompt with its columns."""
