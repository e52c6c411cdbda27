"""What a reward is and takes, in lines for a terminal."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from ..parts.docstrings import described, papers, summary
from .base import RESERVED, parameters
from .registry import resolve, sketch


def about(name: str) -> list[str]:
    """What a reward scores, its papers, the columns that it reads, and its options with types and defaults.

    Args:
        name: as a recipe writes it: a name, FILE.py:NAME or MODULE:NAME.

    Raises:
        ValueError: there is no such reward.
        MissingDependency: its module imports a package that is not installed.
    """
    target = resolve(name)
    short = name.rpartition(":")[2]
    reward = sketch(target, short)
    lines = [f"{name}: {summary(target)}"]
    if found := papers(target):
        lines.append(f"  arXiv {', '.join(found)}")
    if scored := [kind for kind in ("images", "completions") if kind in reward.needed]:
        lines.append(f"  scores {' and '.join(scored)}")
    options = _options(target)
    for word, names in (("needs", reward.needed), ("reads, if there,", reward.optional)):
        if columns := [
            one for one in names if one not in RESERVED and (isinstance(target, type) or one not in options)
        ]:
            lines.append(f"  {word} the column{'s' * (len(columns) > 1)} {', '.join(columns)}")
    texts = described(target)
    lines += [f"  {option}: {typed}. {texts.get(option, '')}".rstrip() for option, typed in options.items()]
    return lines if options else [*lines, "  It has no options."]


def _options(target: Callable[..., Any]) -> dict[str, str]:
    """Option -> its type and default, as its author wrote them.

    The options of a class are the parameters of its constructor. A function has its options among its parameters: those
    with a default that is not None, because columns have none, or None.
    """
    found = {}
    for parameter in (parameters(target) or {}).values():
        given = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        column = not isinstance(target, type) and parameter.default in (None, parameter.empty)
        if not given or column or parameter.name in RESERVED:
            continue
        typed = [] if parameter.annotation is parameter.empty else [inspect.formatannotation(parameter.annotation)]
        value = "required" if parameter.default is parameter.empty else json.dumps(parameter.default, default=repr)
        found[parameter.name] = ", ".join([*(word.strip("'") for word in typed), value])
    return found
