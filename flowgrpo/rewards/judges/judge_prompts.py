"""Prompts with places for a sample's prompt, completion and columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
# What a template calls one of many.
_SINGULAR = {"prompt": "prompts", "completion": "completions"}


class Template:
    """A text in which `{prompt}`, `{completion}` and `{COLUMN}` are replaced, once: what they hold is left as it is.

    Braces around anything but a single word stay, so JSON needs no escaping.

    Args:
        reward: name of the reward, for messages.
        name: of the option.
        text: the template.

    Raises:
        ValueError: it is no text.
    """

    def __init__(self, reward: str, name: str, text: Any) -> None:
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{reward}: {name} is {text!r}; give a text, with {{prompt}} where the prompt belongs")
        self.reward, self.name, self.text = reward, name, text
        self.places = tuple(dict.fromkeys(_PLACE.findall(text)))

    @property
    def needed(self) -> tuple[str, ...]:
        """Arguments of the reward that hold what goes into the places."""
        return tuple(_SINGULAR.get(place, place) for place in self.places)

    def fill(self, values: Mapping[str, Any]) -> str:
        """The text with the values of one sample in their places; None becomes nothing.

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
    """What a template may name, of one sample."""
    values = {name: column[row] for name, column in columns.items() if column is not None}
    values["prompt"] = prompts[row]
    if completions is not None:
        values["completion"] = completions[row]
    return values


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
