"""Regular expressions on the answers of judges, in a process without torch; see `worker.py`."""

from __future__ import annotations

import re
from collections import deque

_EXPONENT = re.compile(r"[eE][-+]?\d+")


def last_match(pattern: str, text: str) -> str | None:
    """The first group of the last place at which a pattern matches, or None. May take for ever.

    An exponent that the pattern leaves behind a number belongs to it: of 1e999 the 1 is no score.
    """
    found = deque(re.finditer(pattern, text, re.DOTALL | re.IGNORECASE), maxlen=1)
    group: str | None = found[0][1] if found else None
    if group is None or not group[-1:].isdigit():
        return group
    exponent = _EXPONENT.match(text, found[0].end(1))
    return group if exponent is None else group + exponent.group()
