"""Loading of libraries without a search for garbage, which would take a fifth of the time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 200
"""So many modules are libraries that the block loads, and not a few modules that were still missing."""


@contextmanager
def loading() -> Iterator[None]:
    """Within this block, Python does not look for garbage; afterwards it leaves alone what the block has loaded.

    Modules stay until the end, and they have a million objects. Python would look through all of them again and again
    while they are loaded, and later in every full search. If the block loads hardly anything, nothing is set aside:
    what is there may be of an earlier command of the same process, and end with it.
    """
    before, on = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            if len(sys.modules) - before >= MANY:
                gc.freeze()
            gc.enable()
