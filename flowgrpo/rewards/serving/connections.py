"""Open connections: how many, for how long, and which of them is closed when there are too many."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

# How often a thread that waits for bytes looks whether its time is over.
LOOK_SECONDS = 0.5
CHUNK = 1 << 16


class TooLong(Exception):
    """More bytes were sent than may be read."""


class Connections:
    """The open connections of a server. Any thread may call the methods.

    A connection that holds a place in the queue is kept. The number of all others is limited. A new connection beyond
    the limit closes the oldest of them. A client sends the head of its request at once, so the oldest one is hardly a
    client's. So connections that say nothing do not keep clients out.

    Args:
        most: largest number of connections without a place.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        # A dictionary keeps the order.
        self._others: dict[socket.socket, None] = {}
        self._ended = False

    def add(self, connection: socket.socket) -> None:
        """Note a new connection, which has no place; close the oldest one if there are too many."""
        with self._lock:
            closed = [next(iter(self._others))] if len(self._others) >= self.most else []
            for old in closed:
                del self._others[old]
            self._others[connection] = None
            ended = self._ended
        for old in closed:
            _shut(old, socket.SHUT_RDWR)
        if ended:
            _shut(connection, socket.SHUT_RD)

    def remove(self, connection: socket.socket) -> None:
        """Forget a connection."""
        with self._lock:
            self._others.pop(connection, None)

    @contextmanager
    def keep(self, connection: socket.socket) -> Iterator[None]:
        """Keep a connection, because it holds a place; afterwards it is the newest of the others."""
        self.remove(connection)
        try:
            yield
        finally:
            self.add(connection)

    def end(self) -> None:
        """Read no more from connections without a place. What is being sent to them is still sent."""
        with self._lock:
            self._ended, others = True, list(self._others)
        for connection in others:
            _shut(connection, socket.SHUT_RD)


class Incoming(io.RawIOBase):
    """The bytes of a connection, each read under a deadline that is a time and not a length of silence.

    Args:
        connection: the connection.
        deadline: function that returns the time at which reading ends; it is asked again and again.
        clock: function that returns the time in seconds.

    Attributes:
        most: how many more bytes may be read; None for any number.
    """

    def __init__(self, connection: socket.socket, deadline: Callable[[], float], clock: Callable[[], float]) -> None:
        super().__init__()
        self._connection, self._deadline, self._clock = connection, deadline, clock
        self.most: int | None = None

    def readable(self) -> bool:
        """Always true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes.

        Raises:
            TimeoutError: the deadline has passed.
            TooLong: more than `most` bytes would be read.
            OSError: the connection is broken.
        """
        if self.most == 0:
            raise TooLong
        with memoryview(buffer).cast("B") as view:
            size = len(view) if self.most is None else min(len(view), self.most)
            count = _within(
                self._connection, self._deadline, self._clock, lambda: self._connection.recv_into(view[:size])
            )
        if self.most is not None:
            self.most -= count
        return count


class Outgoing(io.BufferedIOBase):
    """Writes to a connection, each under a deadline for all of it, however slowly the other side reads.

    Args:
        connection: the connection.
        deadline: function that returns the time at which writing ends; it is asked again and again.
        clock: function that returns the time in seconds.
    """

    def __init__(self, connection: socket.socket, deadline: Callable[[], float], clock: Callable[[], float]) -> None:
        super().__init__()
        self._connection, self._deadline, self._clock = connection, deadline, clock

    def writable(self) -> bool:
        """Always true."""
        return True

    def write(self, data: Any) -> int:
        """Send all data.

        Raises:
            TimeoutError: the deadline has passed.
            OSError: the connection is broken.
        """
        left, sent = memoryview(data), len(data)
        while left:
            part = left[:CHUNK]
            left = left[_within(self._connection, self._deadline, self._clock, partial(self._connection.send, part)) :]
        return sent


def handshake(connection: Any, deadline: Callable[[], float], clock: Callable[[], float]) -> None:
    """Begin the encryption of a connection.

    Raises:
        TimeoutError: the deadline has passed.
        OSError: the other side does not speak TLS, or has gone.
    """
    _within(connection, deadline, clock, lambda: connection.do_handshake() or 0)


def _within(
    connection: socket.socket, deadline: Callable[[], float], clock: Callable[[], float], act: Callable[[], int]
) -> int:
    """Return what `act` returns, which waits for the other side; try again until the deadline."""
    while True:
        left = deadline() - clock()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(min(left, LOOK_SECONDS))
        try:
            return act()
        except TimeoutError:
            continue


def _shut(connection: socket.socket, how: int) -> None:
    """End a connection that another thread uses; the method of an encrypted connection is for one thread only."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, how)
