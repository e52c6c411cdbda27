"""Parts that ask for their inputs by the names of their first parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .choice import Choice


def asked(part: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters before the `*`: inputs that a run has to give, not options."""
    while isinstance(part, partial):
        part = part.func
    before = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in inspect.signature(part).parameters.items() if parameter.kind in before)


def answered(part: Callable[..., Any], has: Mapping[str, Callable[[], Any]]) -> Any:
    """The result of a function for the inputs that it asks for; other inputs are not computed.

    Args:
        part: a function with its options bound.
        has: name of an input -> function that computes it.
    """
    return part(*[has[name]() for name in asked(part)])


def not_given(choice: Choice, names: Sequence[str]) -> list[str]:
    """Messages about inputs that a part asks for and that are not among `names`; empty if there are none."""
    unknown = [name for name in asked(choice.target) if name not in names]
    return [
        f"{choice.kind} {choice.short} asks for {name!r} by a parameter before its `*`, and a run gives only "
        f"{', '.join(names)}; use one of these names, or put an option behind the `*`"
        for name in unknown
    ]
