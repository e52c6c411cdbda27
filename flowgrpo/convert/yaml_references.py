"""References in the YAML of tools that are started by hydra: `${key}`, `${..key}` and `${oc.env:NAME,default}`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..configs.explaining import short
from ..configs.yaml_text import parse_yaml

DEEPEST = 20
"""References that may lead to one another; a longer way is taken for a circle."""
LONGEST = 100_000
"""Characters of a text with its references filled in."""
MOST = 10_000
"""Keys of a file whose sections are filled in."""


class NotSaid:
    """A value that only the environment of a run says.

    Args:
        names: the environment variables.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    @property
    def told(self) -> str:
        """The variables, for messages."""
        return ", ".join(sorted(self.names))


class References:
    """The values of a file with their references followed. No environment is read: its variables have their defaults.

    Args:
        tree: what the file holds.
        place: name of the file, for messages.

    Raises:
        ValueError: a reference leads nowhere or in a circle, or its resolver is not known.
    """

    def __init__(self, tree: Mapping[str, Any], place: str) -> None:
        self.place = place
        self._tree = tree
        self.values: dict[str, Any] = {}
        """Dotted key -> value. A mapping has no key of its own unless it is empty."""
        self.assumed: dict[str, frozenset[str]] = {}
        """Dotted key -> environment variables whose defaults its value has."""
        for key, value in _leaves(tree, ()):
            self._take(key, key, value, DEEPEST)

    def missing(self) -> dict[str, NotSaid]:
        """Keys whose value only the environment says."""
        return {key: value for key, value in self.values.items() if isinstance(value, NotSaid)}

    def _take(self, path: tuple[str, ...], written: tuple[str, ...], value: Any, left: int) -> None:
        """Take a value in. Keys relative to it are relative to where it is `written`."""
        names: set[str] = set()
        found = self._resolved(value, written, left, names)
        if isinstance(found, _Part):
            if not found.held:
                self.values[".".join(path)] = {}
            for inner, held in _leaves(found.held, ()) if found.held else ():
                self._take((*path, *inner), (*found.path, *inner), held, left - 1)
            return
        key = ".".join(path)
        if len(self.values) >= MOST:
            raise ValueError(
                f"{self.place}: with its references followed it has more than {MOST:,} keys, which no configuration "
                "has; look where the file comes from"
            )
        self.values[key] = found
        if names:
            self.assumed[key] = frozenset(names)

    def _resolved(self, value: Any, path: tuple[str, ...], left: int, names: set[str]) -> Any:
        if isinstance(value, list):
            held = [self._resolved(one, path, left, names) for one in value]
            return self._unsaid(held, path) or held
        if not isinstance(value, str) or "${" not in value:
            return value
        if left <= 0:
            raise ValueError(
                f"{self.place}: {'.'.join(path)} is {short(value)}, and its references lead on and on; write the value "
                "itself into a copy of the file"
            )
        parts = [self._followed(inner, path, left, names) if reference else inner for reference, inner in _parts(value)]
        if len(parts) == 1:
            return parts[0]
        if (unsaid := self._unsaid(parts, path)) is not None:
            return unsaid
        text = "".join("null" if part is None else str(part) for part in parts)
        if len(text) > LONGEST:
            raise ValueError(f"{self.place}: {'.'.join(path)} is longer than {LONGEST:,} characters; shorten it")
        return text

    def _unsaid(self, parts: list[Any], path: tuple[str, ...]) -> NotSaid | None:
        """What only the environment says of a value in several parts; None if the file says all of it."""
        if any(isinstance(part, _Part) for part in parts):
            raise ValueError(
                f"{self.place}: {'.'.join(path)} puts a section of the file into a text or a list; write the value "
                "itself into a copy of the file, and convert the copy"
            )
        names = [part.names for part in parts if isinstance(part, NotSaid)]
        return NotSaid(frozenset().union(*names)) if names else None

    def _followed(self, inner: str, path: tuple[str, ...], left: int, names: set[str]) -> Any:
        """The value of a reference, without its `${` and `}`."""
        name, colon, rest = inner.partition(":")
        name = name.strip()
        if not colon:
            return self._referred(name, path, left, names)
        if name == "oc.env":
            variable, comma, default = rest.partition(",")
            if not comma:
                return NotSaid(frozenset({variable.strip()}))
            names.add(variable.strip())
            found = self._resolved(default.strip(), path, left - 1, names)
            return None if isinstance(found, str) and found == "null" else found
        if name == "oc.decode":
            found = self._resolved(rest.strip(), path, left - 1, names)
            return _decoded(found, self.place) if isinstance(found, str) else found
        raise ValueError(
            f"{self.place}: {'.'.join(path)} has ${{{name:.40}:…}}, which is not known here; write the value itself "
            "into a copy of the file, and convert the copy"
        )

    def _referred(self, name: str, path: tuple[str, ...], left: int, names: set[str]) -> Any:
        dots = len(name) - len(name.lstrip("."))
        keys = [*(path[: max(len(path) - dots, 0)] if dots else ()), *name.lstrip(".").split(".")]
        found = self._node(keys)
        if isinstance(found, _Nothing):
            raise ValueError(
                f"{self.place}: {'.'.join(path)} refers to {name:.60}, and the file has no such key; write the value "
                "itself into a copy of the file, and convert the copy"
            )
        if isinstance(found, Mapping):
            return _Part(tuple(keys), found)
        return self._resolved(found, tuple(keys), left - 1, names)

    def _node(self, keys: list[str], left: int = DEEPEST) -> Any:
        place: Any = self._tree
        for number, key in enumerate(keys):
            if isinstance(place, str) and place.startswith("${") and place.endswith("}") and ":" not in place and left:
                # A reference to a section of the file, in which the rest of the keys is.
                return self._node([*place[2:-1].strip().lstrip(".").split("."), *keys[number:]], left - 1)
            if not isinstance(place, Mapping) or key not in place:
                return _Nothing()
            place = place[key]
        return place


class _Nothing:
    """A key that the file does not have."""


@dataclass(frozen=True)
class _Part:
    """A section of the file, and its keys from the top."""

    path: tuple[str, ...]
    held: Mapping[str, Any]


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, tree


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """A text in pieces: (whether it is a reference, without its `${` and `}`; the piece)."""
    start = 0
    while (opened := text.find("${", start)) >= 0:
        if opened > start:
            yield False, text[start:opened]
        depth, place = 1, opened + 2
        while place < len(text) and depth:
            if text.startswith("${", place):
                depth, place = depth + 1, place + 1
            elif text[place] == "}":
                depth -= 1
            place += 1
        if depth:
            yield False, text[opened:]
            return
        yield True, text[opened + 2 : place - 1]
        start = place
    if start < len(text):
        yield False, text[start:]


def _decoded(text: str, place: str) -> Any:
    found = parse_yaml(text, place)
    return found if found is None or isinstance(found, bool | int | float | str) else text
