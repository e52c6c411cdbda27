"""Parts that ask for what they work on by the names of their first parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .choice import Choice


def asked(part: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters before the `*`: what a run has to give, which are no options."""
    while isinstance(part, partial):
        part = part.func
    before = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in inspect.signature(part).parameters.items() if parameter.kind in before)


def answered(part: Callable[..., Any], has: Mapping[str, Callable[[], Any]]) -> Any:
    """What a function returns for what it asks for; nothing else is computed.

    Args:
        part: with its options bound.
        has: name -> what computes it.
    """
    return part(*[has[name]() for name in asked(part)])


def not_given(choice: Choice, names: Sequence[str]) -> list[str]:
    """What is wrong with a part that asks for something that is not among `names`; nothing where all is."""
    unknown = [name for name in asked(choice.target) if name not in names]
    return [
        f"{choice.kind} {choice.short} asks for {name!r} by a parameter before its `*`, and a run gives one of "
        f"{', '.join(names)}; name one of these, or put an option behind the `*`"
        for name in unknown
    ]
