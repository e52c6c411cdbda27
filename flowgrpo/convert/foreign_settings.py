"""The settings of another tool, by their dotted keys. A value of a wrong type is an error that names the key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..configs.explaining import short


class ForeignSettings:
    """What a file of another tool says, and what the tool takes where the file says nothing.

    Args:
        given: dotted key -> value, as the file has them.
        defaults: dotted key -> the tool's own value for a key that the file leaves out.
        place: name of the file, for messages.
        origins: dotted key -> where its value comes from, if the file does not simply have it; for lists.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        place: str,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self.given, self.defaults, self.place = dict(given), dict(defaults), place
        self.origins = dict(origins or {})

    def has(self, key: str) -> bool:
        """Whether the file itself has the key."""
        return key in self.given

    def value(self, key: str) -> Any:
        """The value of a key, or the tool's own value; None if there is neither."""
        return self.given[key] if key in self.given else self.defaults.get(key)

    def number(self, key: str) -> float | None:
        """A finite number; None if there is none. A text such as `1e-4` is a number too, as other tools read it.

        Raises:
            ValueError: the value is something else.
        """
        value = self.value(key)
        if value is None:
            return None
        try:
            found = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            found = math.nan
        if not math.isfinite(found):
            raise self.wrong(key, "a number")
        return found

    def whole(self, key: str) -> int | None:
        """A whole number; None if there is none.

        Raises:
            ValueError: the value is something else.
        """
        found = self.number(key)
        if found is None:
            return None
        if not found.is_integer() or abs(found) > 2**53:
            raise self.wrong(key, "a whole number")
        return int(found)

    def count(self, key: str) -> int:
        """A whole number of at least 1.

        Raises:
            ValueError: the value is something else, or there is none.
        """
        found = self.whole(key)
        if found is None or found < 1:
            raise self.wrong(key, "a whole number of 1 or more")
        return found

    def flag(self, key: str) -> bool:
        """True or false; false if there is no value.

        Raises:
            ValueError: the value is something else.
        """
        value = self.value(key)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def text(self, key: str) -> str | None:
        """A text; None if there is none, or an empty one.

        Raises:
            ValueError: the value is something else.
        """
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value or None

    def texts(self, key: str) -> list[str] | None:
        """A list of texts, or one text; None if there is none.

        Raises:
            ValueError: the value is something else.
        """
        value = self.value(key)
        listed = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else value
        if listed is None:
            return None
        if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
            raise self.wrong(key, "a text or a list of texts")
        return listed

    def pair(self, key: str) -> tuple[float, float] | None:
        """Two numbers, or one number twice with the signs - and +; None if there is no value.

        Raises:
            ValueError: the value is something else.
        """
        value = self.value(key)
        if isinstance(value, list | tuple) and len(value) == 2:
            halves = ForeignSettings({f"{key}.0": value[0], f"{key}.1": value[1]}, {}, self.place)
            low, high = halves.number(f"{key}.0"), halves.number(f"{key}.1")
            if low is not None and high is not None:
                return low, high
            raise self.wrong(key, "a pair of numbers")
        found = self.number(key)
        return None if found is None else (-abs(found), abs(found))

    def wrong(self, key: str, wanted: str) -> ValueError:
        """The error about a value of a wrong type."""
        given = short(without_secrets(key, self.value(key)))
        return ValueError(f"{self.place}: {named(key)} is {given}; write {wanted}, or take the key out")


_SECRET = re.compile(r"(^|[._])(hub_|api_|access_|auth_)?(token|key|secret|password)$", re.IGNORECASE)


def without_secrets(key: str, value: Any) -> Any:
    """A value for messages: a text is hidden if its key says that it is secret, also within lists and mappings."""
    if isinstance(value, Mapping):
        return {inner: without_secrets(str(inner), held) for inner, held in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(key, held) for held in value]
    return "(hidden)" if isinstance(value, str) and value and _SECRET.search(key) else value


def named(key: str) -> str:
    """A key for messages. A key that no tool has may hold anything, so it is quoted unless it is plain."""
    plain = all(character.isalnum() or character in "._-*[]() ×/" for character in key) and key.isprintable()
    return key if plain and len(key) <= 80 else short(key)
