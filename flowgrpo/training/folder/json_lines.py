"""A strict reader of the JSON in prompt files: no value is lost, and no value breaks a file of a run later."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_strict(text: str, place: str, number: int = 1) -> Any:
    """A JSON value.

    Args:
        text: the JSON.
        place: the file, for messages.
        number: the line on which the text begins.

    Raises:
        ValueError: the text is not JSON, an object has a key twice, or a number is not finite. The message names file
            and line.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _Fault(f"the key {twice!r:.80} stands twice; keep one of them")
        return found

    def refused(word: str) -> Any:
        raise _Fault(f"the number {word} is not finite; write null where there is none")

    def finite(word: str) -> float:
        value = float(word)
        return value if math.isfinite(value) else refused(word)

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refused, parse_float=finite)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        raise ValueError(f"{place}, line {line}: not JSON ({error.msg} at column {error.colno})") from None
    except _Fault as error:
        raise ValueError(f"{place}, line {number}: {error}") from None
    except RecursionError:
        raise ValueError(f"{place}, line {number}: the JSON is nested too deeply; write it flatter") from None
    except ValueError as error:
        raise ValueError(f"{place}, line {number}: {str(error).partition(';')[0]}") from None


class _Fault(Exception):
    """JSON that is valid, and refused."""


def unwritable(value: Any) -> str | None:
    """Why a value cannot stand in the files of a run; None if it can."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair, which is no character"
    except (TypeError, ValueError) as error:
        return f"it cannot be written as JSON ({error})"
    return None
