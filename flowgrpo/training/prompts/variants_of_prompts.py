"""Variants of a prompt: a template with variables, whose answer is calculated for each draw of the variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...intake.expressions import value_of, written_value
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
        found = {} if asked is None else {column: written_value(str(asked), drawn)}
    except ValueError as error:
        raise ValueError(f"{row.place or f'prompt {row.id + 1}'}: {error}") from None

    def filled(text: str) -> str:
        return _SLOT.sub(lambda slot: str(drawn.get(slot[1], slot[0])), text)

    messages = row.messages and tuple({**message, "content": filled(message["content"])} for message in row.messages)
    return replace(row.with_columns({**found, VARIABLES: drawn}), text=filled(row.text), messages=messages)


def _drawn(given: Any, where: Any, generator: np.random.Generator) -> dict[str, int | str]:
    """Values of the variables that meet the condition."""
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"`{VARIABLES}` is {given!r:.80}; give a range or a list of texts for each name")
    for _ in range(MOST_TRIES):
        found = {name: _value(name, values, generator) for name, values in given.items()}
        if where is None or value_of(str(where), found) is True:
            return found
    raise ValueError(f"no draw of {MOST_TRIES} meets `{WHERE}`: {where!r:.80}; write a condition that more draws meet")


def _value(name: Any, values: Any, generator: np.random.Generator) -> int | str:
    """A value of one variable, from a range or a list of texts."""
    if isinstance(name, str) and name.isidentifier() and isinstance(values, list):
        match values:
            case [low, high] if type(low) is type(high) is int and -LARGEST <= low <= high <= LARGEST:
                return int(generator.integers(low, high + 1))
            case [_, *_] if all(isinstance(value, str) for value in values):
                return str(values[int(generator.integers(len(values)))])
    raise ValueError(
        f"`{VARIABLES}` has {name!r:.40}: {values!r:.80}; write a name and two rising whole numbers, as in "
        '"a": [1, 99], or a list of texts'
    )
