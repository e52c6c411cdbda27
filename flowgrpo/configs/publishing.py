"""A configuration as others may see it: without credentials."""

from __future__ import annotations

import re
from typing import Any

_SECRET_KEY = re.compile(
    r"(^|[_-])(token|(secret|password|passwd|passphrase|credential|(api|access|private|secret|auth|x)[_-]?key)s?"
    r"|authorization|cookie)$|^key$",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def publishable(value: Any) -> Any:
    """A copy of a configuration that may be published: values of keys that name credentials are hidden.

    Numbers are no credentials: a key such as `token` may also count tokens.
    """
    if isinstance(value, dict):
        return {
            key: "(hidden)"
            if item and isinstance(item, str | list | dict) and _SECRET_KEY.search(str(key))
            else publishable(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [publishable(item) for item in value]
    return _URL_LOGIN.sub("", value) if isinstance(value, str) else value
