"""What the docstring of a part or a reward says, for lists on a terminal and for messages."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any


def summary(target: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, on one line; empty if there is none."""
    return " ".join((inspect.getdoc(target) or "").partition("\n\n")[0].replace("``", "`").split())


def papers(target: Callable[..., Any]) -> list[str]:
    """The arXiv numbers in a docstring, in their order."""
    return list(dict.fromkeys(re.findall(r"\b\d{4}\.\d{4,5}\b", inspect.getdoc(target) or "")))


def described(target: Callable[..., Any]) -> dict[str, str]:
    """The text about each parameter in the sections `Args:` and `Options:` of a docstring, on one line."""
    text = inspect.getdoc(target) or ""
    if isinstance(target, type) and not re.search(r"^(?:Args|Options):$", text, re.MULTILINE):
        text = inspect.getdoc(vars(target).get("__init__")) or ""
    found: dict[str, str] = {}
    for section in re.findall(r"^(?:Args|Options):\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE):
        entries = re.findall(r"^(\w+): (.*(?:\n[ \t]+.*)*)", textwrap.dedent(section), re.MULTILINE)
        found |= {name: " ".join(told.split()) for name, told in entries}
    return found
