"""Prompt templates with places for the prompt, the completion and the columns of a sample."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
# A template has the singular, and the argument of a reward has the plural.
_SINGULAR = {"prompt": "prompts", "completion": "completions"}


class Template:
    """A text in which `{prompt}`, `{completion}` and `{COLUMN}` are replaced.

    Nothing is replaced inside the inserted texts. Braces around anything other than a single word are kept, so JSON
    needs no escaping.

    Args:
        reward: name of the reward, for messages.
        name: name of the option, for messages.
        text: the template.

    Raises:
        ValueError: the template is not a text, or is empty.
    """

    def __init__(self, reward: str, name: str, text: Any) -> None:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{reward}: {name} is {text!r}; give a text, with {{prompt}} where the prompt belongs")
        self.reward, self.name, self.text = reward, name, text
        self.places = tuple(dict.fromkeys(_PLACE.findall(text)))

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the arguments of the reward that fill the places."""
        return tuple(_SINGULAR.get(place, place) for place in self.places)

    def fill(self, values: Mapping[str, Any]) -> str:
        """Return the text with the values of one sample in their places; None becomes an empty text.

        Raises:
            ValueError: there is no value for a place.
        """
        missing = [place for place in self.places if place not in values]
        if missing:
            raise ValueError(
                f"{self.reward}: {self.name} has the place {{{missing[0]}}}, but there are only {', '.join(values)}"
            )
        return _PLACE.sub(lambda found: _shown(values[found.group(1)]), self.text)


def values_of(row: int, prompts: Any, completions: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one sample that a template may name."""
    values = {name: column[row] for name, column in columns.items() if column is not None}
    values["prompt"] = prompts[row]
    if completions is not None:
        values["completion"] = completions[row]
    return values


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
