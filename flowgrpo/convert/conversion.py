"""What becomes of every setting of another tool: carried over, without effect here, or not carried over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..configs.explaining import short
from .foreign_settings import ForeignSettings, named, without_secrets


@dataclass(frozen=True)
class Carried:
    """A setting that the recipe has.

    Attributes:
        theirs: what it comes from: keys with values, or what their program does without a key.
        ours: dotted key of the recipe.
        value: value in the recipe.
        note: what differs, or why the value is another one; empty if there is nothing to say.
    """

    theirs: str
    ours: str
    value: Any
    note: str = ""


@dataclass(frozen=True)
class Remark:
    """A setting that the recipe does not have.

    Attributes:
        theirs: their key with its value.
        text: why it has no effect here, or what to do instead.
    """

    theirs: str
    text: str


@dataclass(frozen=True)
class PlainRow:
    """A setting that needs no thought: the value of their key is the value of ours.

    Attributes:
        theirs: their key.
        ours: our key.
        kind: how the value is read, a method of `ForeignSettings`.
        note: as in `Carried`.
    """

    theirs: str
    ours: str
    kind: str = "number"
    note: str = ""


@dataclass(frozen=True)
class Missing:
    """A setting that has no counterpart here.

    Attributes:
        theirs: their key.
        harmless: values with which the setting does nothing there either.
        text: what to do instead.
    """

    theirs: str
    harmless: tuple[Any, ...]
    text: str


NOTHING: tuple[Any, ...] = (None, False, "", [], {}, ())
"""Values that switch most settings off."""


class Conversion:
    """A recipe in the making, and the list of what it has and has not.

    Args:
        settings: what the other tool's file says.
        name: name of the recipe, as the file has it.
    """

    def __init__(self, settings: ForeignSettings, name: str) -> None:
        self.settings, self.name = settings, name
        self.bases: tuple[str, ...] = ()
        """Recipes of the same method, on which the recipe may build."""
        self.recipe: dict[str, Any] = {}
        self.carried: list[Carried] = []
        self.idle: list[Remark] = []
        self.lost: list[Remark] = []
        self._used: set[str] = set()

    # -- what becomes of a setting -----------------------------------------------------------------------------

    def carry(self, theirs: str | Sequence[str], ours: str, value: Any, note: str = "") -> None:
        """Put a value into the recipe, and say which keys it comes from."""
        keys = [theirs] if isinstance(theirs, str) else list(theirs)
        self._used.update(keys)
        self._put(ours, value)
        self.carried.append(Carried(", ".join(self.told(key) for key in keys), ours, deepcopy(value), note))

    def follow(self, program: str, ours: str, value: Any, note: str = "") -> None:
        """Put a value into the recipe that their program has without a key; `program` says where."""
        self._put(ours, value)
        self.carried.append(Carried(f"({program})", ours, deepcopy(value), note))

    def ignore(self, theirs: str, why: str) -> None:
        """Say that a setting has no effect here."""
        self._used.add(theirs)
        self.idle.append(Remark(self.told(theirs), why))

    def lose(self, theirs: str | Sequence[str], text: str) -> None:
        """Say that a setting could not be carried over, and what to do instead."""
        keys = [theirs] if isinstance(theirs, str) else list(theirs)
        self._used.update(keys)
        remark = Remark(", ".join(self.told(key) for key in keys), text)
        if remark not in self.lost:
            self.lost.append(remark)

    def want(self, text: str) -> None:
        """Say what the recipe still needs, although no key of theirs is about it."""
        self.lost.append(Remark("", text))

    def used(self, *keys: str) -> None:
        """Keys that need no line of their own."""
        self._used.update(keys)

    def _put(self, ours: str, value: Any) -> None:
        place = self.recipe
        *parents, last = ours.split(".")
        for parent in parents:
            inner = place.setdefault(parent, {})
            # A part that is only a name has no options yet.
            place[parent] = inner = {"name": inner} if isinstance(inner, str) else inner
            place = inner
        # A copy: what is put in later belongs to the recipe alone, and YAML would write an anchor for a shared value.
        place[last] = deepcopy(value)

    def told(self, key: str) -> str:
        """A key with its value, as lists show it."""
        if not self.settings.has(key) and key not in self.settings.defaults:
            return named(key)
        told = f"{named(key)} {short(without_secrets(key, self.settings.value(key)))}"
        if key in self.settings.origins:
            return f"{told}, {self.settings.origins[key]}"
        return told if self.settings.has(key) else f"{told} by default"

    # -- many settings at once ---------------------------------------------------------------------------------

    def carry_rows(self, rows: Iterable[PlainRow]) -> None:
        """Carry plain settings over; a setting without a value is left out."""
        for row in rows:
            if self.settings.value(row.theirs) is not None:
                self.carry(row.theirs, row.ours, getattr(self.settings, row.kind)(row.theirs), row.note)
            self.used(row.theirs)

    def lose_rows(self, rows: Iterable[Missing]) -> None:
        """Report settings without a counterpart, unless they do nothing."""
        for row in rows:
            value = self.settings.value(row.theirs)
            if any(
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in (*NOTHING, *row.harmless)
            ):
                self.used(row.theirs)
            else:
                self.lose(row.theirs, row.text)

    def finish(self, idle: Mapping[str, str], unknown: Callable[[str], str] | None = None) -> None:
        """Say of every other key of the file that it has no effect here, or that its meaning is not known.

        Args:
            idle: key, with `*` for any letters -> why it has no effect here.
            unknown: gives what to do about a key that is not known; None to look it up there.
        """
        for key in self.settings.given:
            if key in self._used:
                continue
            why = next((why for pattern, why in idle.items() if fnmatchcase(key, pattern)), None)
            if why is None and self.settings.value(key) is not None:
                advice = "look up what it does there" if unknown is None else unknown(key)
                self.lose(key, f"this key is not known here; {advice}")
            elif why is not None and self.settings.value(key) not in NOTHING:
                self.ignore(key, why)
