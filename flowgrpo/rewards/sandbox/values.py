"""Values that travel between the judge and a completion, and the channel they travel on.

Only data cross: numbers, texts, containers, and a few values of the standard library, as JSON. The side that reads
builds values of the exact types by itself, so an object with an `__eq__` of its own cannot arrive. Anything else stays
where it is, and the other side gets its number. `judging.py` says what the judge does with such a number.
"""

from __future__ import annotations

import builtins
import importlib
import json
import math
import socket
import struct
from collections.abc import Callable
from typing import Any

LARGEST_MESSAGE = 4 << 20
LARGEST_PLAIN_INT = 1 << 53
_HELD_BASES = (str, int, float, bytes, tuple, list, dict, set, frozenset)
# Values of the standard library that are fully described by plain data: module, name -> how to describe them.
_DESCRIBED: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("fractions", "Fraction"): lambda value: [value.numerator, value.denominator],
    ("datetime", "date"): lambda value: [value.year, value.month, value.day],
    ("datetime", "timedelta"): lambda value: [value.days, value.seconds, value.microseconds],
    ("datetime", "datetime"): lambda value: [*value.timetuple()[:6], value.microsecond],
    ("datetime", "time"): lambda value: [value.hour, value.minute, value.second, value.microsecond],
    ("collections", "deque"): lambda value: [list(value)],
}


class Gone(BaseException):
    """The other side has ended. A test cannot catch this as an `Exception` of the code it tests."""


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Return a value as data for JSON.

    Args:
        value: any object.
        other: called for an object that is not data; returns its description, or raises a TypeError.
    """
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is int:
        return value if -LARGEST_PLAIN_INT < value < LARGEST_PLAIN_INT else {"int": hex(value)}
    if kind is float:
        return {"float": repr(value)}
    if kind is list:
        return [encode(inner, other) for inner in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [encode(inner, other) for inner in value]}
    if kind is dict:
        return {"dict": [[encode(key, other), encode(inner, other)] for key, inner in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if kind in (range, slice):
        return {kind.__name__: [encode(part, other) for part in (value.start, value.stop, value.step)]}
    describe = _DESCRIBED.get((kind.__module__, kind.__name__))
    # The description is of the real type only, and a time with a zone has more parts than these.
    if describe and _type(kind.__module__, kind.__name__) is kind and getattr(value, "tzinfo", None) is None:
        return {"value": [kind.__module__, kind.__name__, encode(describe(value), other)]}
    return other(value)


def decode(data: Any, other: Callable[[str, Any], Any]) -> Any:
    """Return the value that some data describe.

    Args:
        data: what JSON has given.
        other: called with the name and the content of a description that is not of plain data.

    Raises:
        ValueError: the data describe nothing.
    """
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, list):
        return [decode(inner, other) for inner in data]
    ((name, content),) = data.items()
    if name == "int":
        return int(content, 16)
    if name == "float":
        return float(content)
    if name in ("tuple", "set", "frozenset"):
        return getattr(builtins, name)(decode(inner, other) for inner in content)
    if name == "dict":
        return {decode(key, other): decode(inner, other) for key, inner in content}
    if name in ("bytes", "bytearray"):
        return getattr(builtins, name).fromhex(content)
    if name == "complex":
        return complex(*map(float, content))
    if name in ("range", "slice"):
        return getattr(builtins, name)(*(decode(part, other) for part in content))
    if name == "value":
        module, kind, parts = content
        if (module, kind) not in _DESCRIBED:
            raise ValueError(f"{module}.{kind} is not a value that can be sent")
        return _type(module, kind)(*decode(parts, other))
    return other(name, content)


def base_of(value: Any) -> type | None:
    """Return the built-in type whose data an object of a derived type has, such as `tuple` for a named tuple."""
    return next((base for base in _HELD_BASES if isinstance(value, base)), None)


class Channel:
    """Requests and answers over a socket. Either side may ask while it answers.

    Args:
        stream: a connected socket.
        serve: answers a request of the other side.
    """

    def __init__(self, stream: socket.socket, serve: Callable[[Any], Any]) -> None:
        self.stream, self.serve, self.gone = stream, serve, False

    def ask(self, request: Any) -> Any:
        """Send a request and return the answer; answer the requests that come in between.

        Raises:
            Gone: the other side has ended, or has sent what is not a message.
        """
        self.send(request)
        while True:
            message = self.receive()
            if not isinstance(message, dict) or not {"ok", "raise", "function"} & set(message):
                self._lost()
            if "function" not in message:
                return message
            self._reply(message)

    def answer(self) -> None:
        """Answer requests until the other side ends."""
        while True:
            self._reply(self.receive())

    def _reply(self, request: Any) -> None:
        answer = self.serve(request)
        try:
            self.send(answer)
        except (ValueError, RecursionError) as error:
            self.send({"raise": {"name": type(error).__name__, "arguments": [str(error)]}})

    def send(self, message: Any) -> None:
        """Send a message."""
        data = json.dumps(message).encode()
        if len(data) > LARGEST_MESSAGE:
            raise ValueError(f"a value of {len(data)} bytes is too large to be sent; {LARGEST_MESSAGE} may be")
        try:
            self.stream.sendall(struct.pack("<I", len(data)) + data)
        except OSError:
            self._lost()

    def receive(self) -> Any:
        """Return the next message."""
        (length,) = struct.unpack("<I", self._read(4))
        if length > LARGEST_MESSAGE:
            self._lost()
        try:
            return json.loads(self._read(length))
        except (ValueError, RecursionError):
            self._lost()

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            try:
                part = self.stream.recv(min(length, 1 << 16))
            except OSError:
                part = b""
            if not part:
                self._lost()
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _lost(self) -> None:
        self.gone = True
        raise Gone("it ended before its tests")


def _type(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
