"""A request and its reply within a number of seconds, whatever the server does.

The HTTP library counts seconds of silence. A server that sends a byte now and then is never silent, so it can hold a
client for as long as it likes. The look-up of a name and a proxy have no limit at all. So an exchange runs in a thread
of its own. Its caller waits for the thread, and hangs up when the time is over.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import requests
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from ..waiting import within

T = TypeVar("T")
_running = threading.local()


class Exchange(Generic[T]):
    """One request and its reply.

    Args:
        work: function that sends the request and returns the reply. It runs in another thread. It should look at `over`
            between two pieces of the reply.
    """

    def __init__(self, work: Callable[[Exchange[T]], T]) -> None:
        self.over = False
        self._work = work
        self._lock, self._done = threading.Lock(), threading.Event()
        self._socket: socket.socket | None = None
        self._found: list[T] = []
        self._error: BaseException | None = None

    def within(self, seconds: float) -> T:
        """Return what the work returned.

        Raises:
            TimeoutError: the work took longer. Its connection is closed, and its thread ends by itself.
            Unwanted: nobody wants the reply any more; likewise.
            Exception: what the work raised.
        """
        threading.Thread(target=self._run, name="exchange", daemon=True).start()
        try:
            if not within(self._done, seconds):
                raise TimeoutError
        finally:
            self._hang_up()
        if self._error is not None:
            raise self._error
        return self._found[0]

    def uses(self, connection: socket.socket) -> None:
        """Remember the connection on which the reply will come."""
        with self._lock:
            self._socket = connection
            over = self.over
        if over:
            _shut(connection)

    def _run(self) -> None:
        _running.exchange = self
        try:
            self._found.append(self._work(self))
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def _hang_up(self) -> None:
        # A connection whose exchange is complete may be in use by the next exchange already.
        if self._done.is_set():
            return
        with self._lock:
            self.over, connection = True, self._socket
        if connection is not None:
            _shut(connection)


def _shut(connection: socket.socket) -> None:
    """End both directions of a connection, which wakes the thread that waits for it; never wait for the other side."""
    with contextlib.suppress(OSError):
        # The method of an encrypted connection is not for two threads at a time.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Known:
    """A connection that says which socket it uses, before it sends and before it waits for the reply."""

    sock: Any

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()  # type: ignore[attr-defined]
        self._tell()
        super().send(data)  # type: ignore[misc]

    def getresponse(self, *arguments: Any, **more: Any) -> Any:
        self._tell()
        return super().getresponse(*arguments, **more)  # type: ignore[misc]

    def _tell(self) -> None:
        exchange = getattr(_running, "exchange", None)
        if exchange is not None and self.sock is not None:
            exchange.uses(self.sock)


class _Plain(_Known, HTTPConnection):
    pass


class _Encrypted(_Known, HTTPSConnection):
    pass


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _Plain


class _EncryptedPool(HTTPSConnectionPool):
    ConnectionCls = _Encrypted


class ClosableAdapter(requests.adapters.HTTPAdapter):
    """Connections of `requests` that an `Exchange` can close from another thread."""

    def init_poolmanager(self, *arguments: Any, **more: Any) -> None:
        """Make the pools of connections."""
        super().init_poolmanager(*arguments, **more)
        self.poolmanager.pool_classes_by_scheme = {"http": _PlainPool, "https": _EncryptedPool}

    def proxy_manager_for(self, proxy: str, **more: Any) -> Any:
        """Return the pools of connections through a proxy."""
        manager = super().proxy_manager_for(proxy, **more)
        if not proxy.lower().startswith("socks"):
            manager.pool_classes_by_scheme = {"http": _PlainPool, "https": _EncryptedPool}
        return manager
