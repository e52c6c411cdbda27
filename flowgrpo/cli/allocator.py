"""A setting of the C allocator: what it does with freed memory."""

from __future__ import annotations

import ctypes
import os
import platform

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT = 1 << 30
# The largest value that every version of glibc accepts.
MAPPED = 32 << 20


def keep_freed_memory() -> bool:
    """Have glibc keep up to 1 GiB that is free, instead of handing it back to the system after each call.

    An iteration on a CPU allocates and frees the same activations again and again. With glibc's defaults, the system
    takes their pages back and clears them anew each time. Measurements put this at a tenth of an iteration. Blocks of
    more than 32 MiB still go back at once. Without glibc, or if the environment has its own settings, nothing is
    changed.

    Returns:
        Whether the setting was made.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if own or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, KEPT) and libc.mallopt(_M_MMAP_THRESHOLD, MAPPED))
