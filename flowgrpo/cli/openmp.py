"""A setting of GNU's OpenMP, with which torch computes on Linux: how long its threads try before they sleep."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["sleep_soon"]

TRIES = 1000


def sleep_soon(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Have a thread that waits for others try 1,000 times, and then give its core away.

    By default it tries for milliseconds. While another program has a core, the thread that is waited for does not run,
    and the tries only keep it from running. With two busy programs on two cores, an iteration of the default recipe
    took 50 s, and 3.2 s with 1,000 tries. Without other programs it took 1.46 s, and 1.51 s with 1,000 tries.

    No number changes. The library reads the setting when it is loaded, so this must come before torch is imported. If
    the environment has a setting of its own, nothing is changed.

    Returns:
        Whether the setting was made.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environment):
        return False
    environment["GOMP_SPINCOUNT"] = str(TRIES)
    return True
