"""The process of a completion: it loads the code, then does what the judge asks, until it is killed.

Nothing here is trusted. The code can replace every function of this module. All that it gains is to send other data.
"""

from __future__ import annotations

import builtins
import io
import operator
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from .values import Channel, Gone, base_of, decode, encode

LONGEST_MESSAGE = 200
ACTIONS: dict[str, Callable[..., Any]] = {
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "iter": iter,
    "next": next,
    **{name: getattr(builtins, name) for name in ("len", "bool", "str", "repr")},
    **{
        name: getattr(operator, name)
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
    },
}


def run_program(code: str, notes: int) -> None:
    """Run code as a program, with standard input and output, and write its error to a file."""
    sys.stdin = _text(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = _text(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    module = _module("__main__")
    try:
        exec(compile(code, "solution.py", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        os.write(notes, message_of(error).encode(errors="replace"))
        os._exit(1)


def serve(code: str, stream: socket.socket) -> None:
    """Load code as a module and answer the judge.

    The first message says how the loading went. The code runs as a library, so that its main part does not run.
    """
    module = _module("solution")
    solution = Solution(module.__dict__, stream)
    leave = os._exit
    try:
        try:
            exec(compile(code, "solution.py", "exec"), module.__dict__)
        except BaseException as error:
            solution.channel.send({"error": message_of(error)})
            leave(1)
        solution.channel.send({"loaded": True})
        solution.channel.answer()
    except Gone:
        leave(0)


class Solution:
    """The objects of a completion, and what the judge asks about them.

    Args:
        names: the names of the loaded module.
        stream: the socket to the judge.
    """

    def __init__(self, names: dict[str, Any], stream: socket.socket) -> None:
        self.names, self.channel = names, Channel(stream, self._do)
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}

    def _do(self, request: Any) -> Any:
        try:
            if request["do"] == "name":
                if request["name"] not in self.names:
                    raise NameError(f"name {request['name']!r} is not defined")
                return {"ok": self._encode(self.names[request["name"]])}
            arguments = decode(request["arguments"], self._known)
            if request["do"] != "call":
                return {"ok": self._encode(ACTIONS[request["do"]](*arguments))}
            function, *given = arguments
            value = function(*given, **decode(request["named"], self._known))
            # A function without a value may have changed what it was given.
            changed = [encode(one, self._describe) for one in given] if value is None else None
            return {"ok": self._encode(value), "changed": changed}
        except Gone:
            raise
        except BaseException as error:
            return {"raise": self._error(error)}

    def _encode(self, value: Any) -> Any:
        return encode(value, self._describe)

    def _describe(self, value: Any) -> Any:
        if isinstance(value, type) and value in vars(builtins).values():
            return {"builtin": value.__name__}
        described: dict[str, Any] = {"number": self._number(value), "name": type(value).__name__}
        if isinstance(value, type):
            described["name"] = value.__name__
            if issubclass(value, BaseException):
                described["error"] = _built_in_error(value)
        elif (base := base_of(value)) is not None:
            plain = float(value) if base is float else base(value)
            described["data"] = encode(plain, self._describe)
        return {"object": described}

    def _number(self, value: Any) -> int:
        # The list keeps the objects alive, so that no other object gets the same id.
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def _error(self, error: BaseException) -> Any:
        kind = type(error)
        described: dict[str, Any] = {"name": _built_in_error(kind), "arguments": [message_of(error, named=False)]}
        if getattr(builtins, kind.__name__, None) is not kind:
            described |= {"object": self._number(error), "class": self._describe(kind)}
        try:
            plain = encode(list(error.args), _refuse)
            described["arguments"] = plain
        except BaseException:
            pass
        return described

    def _known(self, name: str, content: Any) -> Any:
        if name == "object":
            return self.objects[content]
        if name == "builtin":
            return getattr(builtins, content)
        if name == "iterator":
            return iter(decode(content, self._known))

        def ask(*given: Any, **named: Any) -> Any:
            answer = self.channel.ask(
                {"function": content, "arguments": self._encode(list(given)), "named": self._encode(named)}
            )
            if "raise" in answer:
                raise getattr(builtins, answer["raise"]["name"])(*answer["raise"]["arguments"])
            return decode(answer["ok"], self._known)

        return ask


def message_of(error: BaseException, named: bool = True) -> str:
    """Return the message of an exception, with its type if wished, in a text of limited length."""
    try:
        text = f"{type(error).__name__}: {error}" if named else f"{error}"
        return text[:LONGEST_MESSAGE].removesuffix(": ")
    except BaseException:
        return "an exception that cannot be shown"


def _built_in_error(kind: type) -> str:
    return next(base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base)


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is not plain data")


def _text(stream: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, "utf-8", "surrogateescape")


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module
