"""The tools that a form with turns chooses by name: a tool answers the calls that a policy writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ....intake.expressions import LONGEST, written_value

if TYPE_CHECKING:
    from ...data import PromptRow

ERROR = "error"
_ARITHMETIC = re.compile(r"[\d.()+*/%<>=!-]+")
_WHOLE = re.compile(r"(?<![\d.])\d+")


def calculator(call: str, row: PromptRow, *, digits: Annotated[int, Field(ge=1, le=LONGEST)] = 30) -> str:
    """The exact value of numbers with `+ - * / // % **` and brackets, such as `-10` or `7/2`; else `error`.

    A comparison, such as `2 * 3 < 7`, has the value `yes` or `no`. A call without text is about the prompt. White space
    does not count, nor does `=` at the end.

    Args:
        call: the text of the call.
        row: the prompt.
        digits: the most characters of a call and of its value, so that no call takes long; at most 300.
    """
    text = "".join((call.strip() or row.text).split()).removesuffix("=")
    if len(text) > digits or not _ARITHMETIC.fullmatch(text):
        return ERROR
    try:
        # Python has no numbers such as 007.
        value = written_value(_WHOLE.sub(lambda number: str(int(number[0])), text), {})
    except ValueError:
        return ERROR
    return value if len(value) <= digits else ERROR


TOOLS: dict[str, Callable[..., str]] = {"calculator": calculator}
"""`tool(call, row, *, ...) -> text`: the answer to the text of a call, for a prompt with its columns."""
