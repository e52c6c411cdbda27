"""Contexts that replace something temporarily: attributes of an instance, or weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set instance attributes for the duration of the block.

    The attributes are set in `__dict__`, because a pipeline's own `__setattr__` rewrites its config and a module's
    `__setattr__` registers children.
    """
    saved = {name: owner.__dict__[name] for name in attributes if name in owner.__dict__}
    owner.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            owner.__dict__.pop(name, None)
        owner.__dict__.update(saved)


def exchanging(enter: Callable[[], None], leave: Callable[[], None]) -> Callable[[], AbstractContextManager[None]]:
    """A context that calls `enter` at its beginning and `leave` at its end; it can be entered any number of times."""

    @contextmanager
    def entered() -> Iterator[None]:
        enter()
        try:
            yield
        finally:
            leave()

    return entered
