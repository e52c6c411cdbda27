"""The bytes that the requests of a server may take together."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Smaller allocations are left to the usual allocator.
LEAST_PAGES = 1 << 20


class TooLarge(Exception):
    """One request alone would take more than all requests may take together."""


class NoMemory(Exception):
    """The other requests leave too little; the same request may succeed later."""


class Budget:
    """A number of bytes that is shared by requests. Any thread may use it.

    Args:
        most: bytes that all requests may take together.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._taken = 0

    @property
    def taken(self) -> int:
        """Bytes that are taken now."""
        return self._taken

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes bytes for one request; at the end of the context, all of them are given back.

        The function is called with a number of bytes before they are allocated. It raises `TooLarge` or `NoMemory` if
        they must not be.
        """
        own = 0

        def take(size: int) -> None:
            nonlocal own
            with self._lock:
                if own + size > self.most:
                    raise TooLarge(own + size)
                if self._taken + size > self.most:
                    raise NoMemory
                self._taken += size
                own += size

        try:
            yield take
        finally:
            with self._lock:
                self._taken -= own


def pages(size: int) -> memoryview:
    """Return `size` writable zeros.

    Many of them use memory only as they are written, and give it back to the system when nobody uses them any more. The
    usual allocator keeps what was freed for each thread, so a server with many threads would use several times the
    budget.
    """
    if size < LEAST_PAGES:
        return memoryview(bytearray(size))
    if hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    return memoryview(mmap.mmap(-1, size))
