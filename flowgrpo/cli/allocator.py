"""What the C allocator does with memory that is given back."""

from __future__ import annotations

import ctypes
import os
import platform

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT = 1 << 30
# The most that every version of glibc takes.
MAPPED = 32 << 20


def keep_freed_memory() -> bool:
    """Have glibc keep up to 1 GiB that is free, instead of handing it back to the system after each call.

    An iteration on a CPU allocates and frees the same activations over and over; with glibc's defaults the system takes
    their pages back and clears them anew each time, which was measured as a tenth of an iteration. Blocks of more than
    32 MiB still go back at once. Nothing is changed without glibc, or where the environment has settings of its own.

    Returns:
        Whether it was set.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if own or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, KEPT) and libc.mallopt(_M_MMAP_THRESHOLD, MAPPED))
