"""Calls of tools in completions: how they are read, and how alike two calls are."""

from __future__ import annotations

import json
import re
from typing import Any

BEGIN, END = "<tool>", "</tool>"


def check_marks(reward: str, begin: Any, end: Any) -> None:
    """Refuse marks that cannot tell where a call begins and ends.

    Raises:
        ValueError: a mark is no text, or `end` is empty.
    """
    if not isinstance(begin, str) or not isinstance(end, str) or not end:
        raise ValueError(
            f"{reward}: begin is {begin!r} and end {end!r}; write the two texts as in rollout.form, such as {BEGIN} "
            f"and {END}"
        )


def calls_in(text: str, begin: str = BEGIN, end: str = END) -> list[str]:
    """The texts of all whole calls in a completion; with an empty `begin`, a call begins where the one before ended."""
    if not begin:
        return text.split(end)[:-1]
    return re.findall(f"{re.escape(begin)}(.*?){re.escape(end)}", text, re.DOTALL)


def likeness(call: str, other: str) -> float:
    """How alike two calls are, from 0 to 1.

    Calls that are JSON objects with a `name` are alike if their names are equal: the likeness is the mean of 1 and of
    the share of the arguments in either call that are equal in both. Arguments are the entries of `arguments`. Other
    calls have 1 if they are equal without white space, and 0 otherwise.
    """
    one, two = _named(call), _named(other)
    if one is None or two is None:
        return float("".join(call.split()) == "".join(other.split()))
    if one["name"] != two["name"]:
        return 0.0
    first, second = (found.get("arguments") or {} for found in (one, two))
    if not isinstance(first, dict) or not isinstance(second, dict):
        return (1.0 + float(first == second)) / 2
    names = {*first, *second}
    same = sum(name in first and name in second and first[name] == second[name] for name in names)
    return (1.0 + (same / len(names) if names else 1.0)) / 2


def _named(call: str) -> dict[str, Any] | None:
    """A call as a JSON object with a name; None if it is something else."""
    try:
        found = json.loads(call)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "name" in found else None
