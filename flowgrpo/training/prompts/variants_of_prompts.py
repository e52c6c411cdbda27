"""Variants of a prompt: a template with variables, whose answer is calculated for each draw of the variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from .expressions import value_of
from .prompt_rows import PromptRow

VARIABLES, WHERE = "variables", "where"
MOST_TRIES = 1000
LARGEST = 2**53
_SLOT = re.compile(r"\{([^\W\d]\w*)\}")


def variant_of(row: PromptRow, column: str, generator: np.random.Generator) -> PromptRow:
    """The prompt with drawn values in its slots, and with a calculated column; unchanged if it has no `variables`.

    Args:
        row: the template. Its column `variables` is a mapping from names to `[low, high]`, two whole numbers between
            which a value is drawn, or to a list of texts. `{name}` in the words of the prompt is a slot. The column
            `where`, if there is one, is a condition that the values must meet.
        column: name of the column that is calculated, such as `answer`: an expression of the variables, see
            `value_of`. A prompt may lack the column.
        generator: draws the values.

    Returns:
        The prompt, whose column `variables` has the drawn values.

    Raises:
        ValueError: a column is wrong, or no draw meets the condition. The message names file and line.
    """
    given = row.columns.get(VARIABLES)
    if given is None:
        return row
    try:
        drawn = _drawn(given, row.columns.get(WHERE), generator)
        asked = row.columns.get(column)
        found = {} if asked is None else {column: _written(value_of(str(asked), drawn))}
    except ValueError as error:
        raise ValueError(f"{row.place or f'prompt {row.id + 1}'}: {error}") from None

    def filled(text: str) -> str:
        return _SLOT.sub(lambda slot: _written(drawn[slot[1]]) if slot[1] in drawn else slot[0], text)

    messages = row.messages and tuple({**message, "content": filled(message["content"])} for message in row.messages)
    values = {name: value if isinstance(value, str) else int(value) for name, value in drawn.items()}
    return replace(
        row, text=filled(row.text), messages=messages, columns={**row.columns, **found, VARIABLES: values}
    )  # fmt: skip


def _drawn(given: Any, where: Any, generator: np.random.Generator) -> dict[str, Fraction | str]:
    """Values of the variables that meet the condition."""
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"`{VARIABLES}` is {given!r:.80}; give a range or a list of texts for each name")
    for name, values in given.items():
        if not isinstance(name, str) or not name.isidentifier() or not (_is_range(values) or _is_list(values)):
            raise ValueError(
                f"`{VARIABLES}` has {name!r:.40}: {values!r:.80}; write a name and two rising whole numbers, as in "
                '"a": [1, 99], or a list of texts'
            )
    for _ in range(MOST_TRIES):
        found: dict[str, Fraction | str] = {}
        for name, values in given.items():
            if _is_range(values):
                found[name] = Fraction(int(generator.integers(values[0], values[1] + 1)))
            else:
                found[name] = values[int(generator.integers(len(values)))]
        if where is None or value_of(str(where), found) is True:
            return found
    raise ValueError(f"no draw of {MOST_TRIES} meets `{WHERE}`: {where!r:.80}; write a condition that more draws meet")


def _is_range(values: Any) -> bool:
    whole = isinstance(values, list) and len(values) == 2 and all(type(value) is int for value in values)
    return whole and -LARGEST <= values[0] <= values[1] <= LARGEST


def _is_list(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def _written(value: Fraction | bool | str) -> str:
    """A value as a text: 7, 7/2, yes or no, or the text itself."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
