"""Checks of options and columns that several rewards share. The error of each check says what to write."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..parts.plugins import nearest

T = TypeVar("T")


def check_flag(reward: str, name: str, value: Any) -> None:
    """Refuse an option that is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{reward}: {name} is {value!r}; give true or false")


def check_count(reward: str, name: str, value: Any, least: int = 1) -> None:
    """Refuse an option that is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{reward}: {name} is {value!r}; give a whole number of {least} or more")


def check_positive(reward: str, name: str, value: Any, example: str = "1") -> None:
    """Refuse an option that is not a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{reward}: {name} is {value!r}; give a number above 0, such as {example}")


def check_share(reward: str, name: str, value: Any, what: str = "a share above 0") -> None:
    """Refuse an option that is not a number above 0, at most 1. `what` says in words what it is."""
    check_positive(reward, name, value, "0.5")
    if value > 1:
        raise ValueError(f"{reward}: {name} is {value!r}; give {what}, at most 1")


def check_seconds(reward: str, seconds: Any) -> None:
    """Refuse a time limit that is not a positive, finite number."""
    check_positive(reward, "seconds", seconds, "2")


def check_memory(reward: str, memory_mb: Any) -> None:
    """Refuse a memory limit under which no Python interpreter could start."""
    if isinstance(memory_mb, bool) or not isinstance(memory_mb, int) or memory_mb < 64:
        raise ValueError(f"{reward}: memory_mb is {memory_mb!r}; give a whole number of 64 or more, such as 512")


def check_weights(reward: str, weights: Any, defaults: Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each part of a reward. A part that `weights` does not name has its weight of `defaults`.

    Raises:
        ValueError: a part is unknown, a weight is not a number of 0 or more, or all weights are 0.
    """
    if not isinstance(weights, (Mapping, type(None))):
        raise ValueError(f"{reward}: weights is {weights!r}; give part: weight for some of {', '.join(defaults)}")
    for part, weight in (weights or {}).items():
        if part not in defaults:
            raise ValueError(
                f"{reward}: weights names {part!r}{nearest(str(part), defaults)} The parts are {', '.join(defaults)}"
            )
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise ValueError(f"{reward}: the weight of {part} is {weight!r}; give a number of 0 or more")
    merged = {**defaults, **(weights or {})}
    if not any(merged.values()):
        raise ValueError(f"{reward}: all weights are 0; give one of {', '.join(defaults)} a weight above 0")
    return merged


def weighted(weights: Mapping[str, float], parts: Mapping[str, float]) -> float:
    """Return the weighted mean of the parts that are not NaN; NaN if none of these parts has a weight above 0."""
    known = {part: value for part, value in parts.items() if not math.isnan(value)}
    total = math.fsum(weights[part] for part in known)
    return math.fsum(weights[part] * value for part, value in known.items()) / total if total else math.nan


def read_column(reward: str, name: str, column: Sequence[Any], read: Callable[[Any, str], T]) -> list[T]:
    """Return what `read` makes of each row of a column; `read` also takes words for messages that say where it is."""
    return [read(entry, f"{reward}: the column `{name}`, row {row},") for row, entry in enumerate(column)]


def read_entries(given: Any, where: str, most: int, what: str) -> list[Any]:
    """Return the entries of a list in a recipe or in a prompt file; a text may contain the list as JSON.

    Args:
        given: the list; None or an empty text stand for an empty list. A text that is no JSON is the only entry.
        where: what has the list, for messages, such as "quiz: the column `questions`, row 3,".
        most: largest number of entries.
        what: what the entries are, for messages, such as "questions".

    Raises:
        ValueError: it is no list, or it has too many entries.
    """
    if given is None or given == "":
        return []
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = [given]
    if not isinstance(given, (list, tuple)) or len(given) > most:
        raise ValueError(f"{where} has {given!r:.80}; give a list of at most {most} {what}")
    return list(given)
