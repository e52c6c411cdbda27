"""Regular expressions on the answers of judges, in a process without torch; see `worker.py`."""

from __future__ import annotations

import re
from collections import deque


def last_match(pattern: str, text: str) -> list[str | None] | None:
    """The groups of the last place at which a pattern matches, or None. May take for ever."""
    found = deque(re.finditer(pattern, text, re.DOTALL | re.IGNORECASE), maxlen=1)
    return list(found[0].groups()) if found else None
