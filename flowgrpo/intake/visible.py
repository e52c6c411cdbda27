"""Text from files that anybody may have made, as a terminal may print it."""

from __future__ import annotations

import re

# Controls of terminals, and marks that turn the direction of writing.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """A text whose characters a terminal would take for commands are written as escapes; lines and tabs stay."""
    return _COMMANDS.sub(lambda found: repr(found[0])[1:-1], text)


def on_one_line(text: str) -> str:
    """As `visible`, with the ends of lines as escapes too, so that a text cannot pretend to be several lines."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")
