"""Models that the rewards of a process share: a model that several of them ask for is in memory once."""

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
    """A reward's hold on a model. The model stays in memory until every reward that borrowed it has released it.

    Attributes:
        value: the model; do not use it after `close`.
    """

    def __init__(self, key: Hashable, value: T) -> None:
        self._key, self.value, self._open = key, value, True

    @property
    def shared(self) -> bool:
        """Whether another reward has borrowed the model too."""
        with _LOCK:
            return self._open and _LOADED[self._key].holders > 1

    def close(self) -> None:
        """Release the model. A second call does nothing."""
        with _LOCK:
            if not self._open:
                return
            self._open = False
            _LOADED[self._key].holders -= 1
            if not _LOADED[self._key].holders:
                del _LOADED[self._key]
            # This is the last reference that this reward has. The memory is freed when no reward has one any more.
            del self.value

    def __del__(self) -> None:
        self.close()


def borrow(key: Hashable, load: Callable[[], T]) -> Lease[T]:
    """Borrow the model under `key`. The first call with this key loads the model.

    Args:
        key: everything that decides what `load` returns: kind, files, dtype, device.
        load: function that loads the model; it is called at most once while any lease of the key is open. Its
            exceptions are passed on.
    """
    with _LOCK:
        # A lease may be garbage-collected at any moment, which removes its entry from the table.
        loaded = _LOADED.get(key) or _Loaded(load(), 0)
        loaded.holders += 1
        _LOADED[key] = loaded
        return Lease(key, loaded.value)
