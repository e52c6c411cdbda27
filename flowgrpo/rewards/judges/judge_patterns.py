"""Regular expressions on the answers of judges. They run in a process without torch; see `worker.py`."""

from __future__ import annotations

import re
from collections import deque

_EXPONENT = re.compile(r"[eE][-+]?\d+")


def last_match(pattern: str, text: str) -> str | None:
    """Return the first group of the last match of a pattern, or None. This function may never return.

    If the group ends before an exponent, the exponent is added, because the 1 of 1e999 is not a score.
    """
    found = deque(re.finditer(pattern, text, re.DOTALL | re.IGNORECASE), maxlen=1)
    group: str | None = found[0][1] if found else None
    if group is None or not group[-1:].isdigit():
        return group
    exponent = _EXPONENT.match(text, found[0].end(1))
    return group if exponent is None else group + exponent.group()
