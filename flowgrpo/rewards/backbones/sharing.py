"""One model in memory for all rewards of a process that ask for the same one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Loaded:
    value: Any
    holders: int


_LOADED: dict[Hashable, _Loaded] = {}
_LOCK = threading.RLock()


class Lease(Generic[T]):
    """A model that is kept in memory until every reward that borrowed it has let it go.

    Attributes:
        value: the model; not to be used after `close`.
    """

    def __init__(self, key: Hashable, value: T) -> None:
        self._key, self.value, self._open = key, value, True

    @property
    def shared(self) -> bool:
        """Whether another reward holds it too."""
        with _LOCK:
            return self._open and _LOADED[self._key].holders > 1

    def close(self) -> None:
        """Let it go. A second call does nothing."""
        with _LOCK:
            if not self._open:
                return
            self._open = False
            _LOADED[self._key].holders -= 1
            if not _LOADED[self._key].holders:
                del _LOADED[self._key]
            # The last reference of this reward goes, so that the memory is free once no one holds it.
            del self.value

    def __del__(self) -> None:
        self.close()


def borrow(key: Hashable, load: Callable[[], T]) -> Lease[T]:
    """The model under `key`, loaded by the first who asks.

    Args:
        key: everything that decides what `load` returns: kind, files, dtype, device.
        load: called at most once while any lease of the key is open. What it raises is passed on.
    """
    with _LOCK:
        # A lease may be collected at any moment, and take its entry out of the table.
        loaded = _LOADED.get(key) or _Loaded(load(), 0)
        loaded.holders += 1
        _LOADED[key] = loaded
        return Lease(key, loaded.value)
