"""The process of the judge: it runs the tests, and asks the process of the completion for every value it does not have.

The code of the completion is never in this process. A name that the tests use and do not define becomes a question:
a call sends its arguments as data, and data come back. The tests compare these data here, with Python's own functions.

An object of a class of the completion stays with the completion, and is a `StandIn` here. A test may call it, read its
attributes and items, and take its length, truth or text: these are answers, and the test compares them. But a test that
lets such an object compare itself with the right answer (`==`, `<`, `in`, `- 4`) would let the completion judge itself,
so all these fail.
"""

from __future__ import annotations

import ast
import builtins
import collections
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .solution import message_of
from .values import Channel, Gone, base_of, decode, encode

# What decides, measures or converts. If tests call nothing but built-in functions, these are the tests' own.
WRAPPERS = {
    *("all", "any", "bool", "callable", "dict", "enumerate", "filter", "float", "frozenset", "getattr", "hasattr"),
    *("hash", "id", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "next", "print", "range", "repr"),
    *("abs", "round", "set", "sorted", "str", "tuple", "type", "zip"),
}


def run_tests(steps: list[dict[str, str]], stream: socket.socket, verdicts: int) -> None:
    """Run the steps of tests, and write a line of JSON about each to the file `verdicts`.

    Args:
        steps: `kind` and `source`, see `sandbox.ProgramStep`.
        stream: the socket to the completion.
        verdicts: descriptor of a file that the completion does not have.
    """
    names = Names([step["source"] for step in steps], stream)

    def send(**record: Any) -> None:
        os.write(verdicts, json.dumps(record).encode() + b"\n")

    try:
        loaded = names.channel.receive()
        if "error" in loaded:
            send(error=str(loaded["error"])[:400])
            return
        for number, step in enumerate(steps):
            try:
                passed = _passes(step, names)
                # A bare `except` in a test catches even the end of the completion.
                if names.channel.gone:
                    raise Gone("it ended before its tests")
                send(step=number, passed=passed)
            except Gone:
                raise
            except BaseException as error:
                if names.channel.gone:
                    raise Gone("it ended before its tests") from None
                send(step=number, error=message_of(error))
    except Gone:
        return
    send(end=True)


def _passes(step: dict[str, str], names: Names) -> bool:
    code = compile(step["source"], "tests", "eval" if step["kind"] == "value" else "exec")
    if step["kind"] == "value":
        return eval(code, names) is True
    exec(code, names)
    return True


class Names(dict[str, Any]):
    """The names of the tests; a name that is not among them is asked of the completion, built-in names excepted.

    Args:
        sources: the tests.
        stream: the socket to the completion.
    """

    def __init__(self, sources: list[str], stream: socket.socket) -> None:
        super().__init__({"__name__": "tests", "__builtins__": builtins})
        self.channel = Channel(stream, self._serve)
        self.functions: list[Callable[..., Any]] = []
        self.remotes: dict[int, Any] = {}
        self.modules, self.tested = modules_and_tested(sources)

    def __missing__(self, name: str) -> Any:
        # A completion that defines `all` or `len` must not change what the tests mean by it.
        if hasattr(builtins, name) and name not in self.tested:
            raise KeyError(name)
        # Neither must a completion that defines a `math` of its own.
        if name in self.modules:
            return importlib.import_module(name)
        try:
            return self._answer({"do": "name", "name": name})
        except NameError:
            raise KeyError(name) from None

    def do(self, action: str, *arguments: Any) -> Any:
        """Ask the completion to do something with its objects."""
        return self._answer({"do": action, "arguments": self.encode(list(arguments))})

    def call(self, function: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function of the completion. Lists, dicts and sets that it changed in place change here too."""
        request = {"do": "call", "arguments": self.encode([function, *given]), "named": self.encode(named)}
        changed: list[Any] = []
        value = self._answer(request, changed)
        for mine, now in zip(given, changed):
            if isinstance(mine, (list, bytearray)) and type(mine) is type(now):
                mine[:] = now
            elif isinstance(mine, (dict, set)) and type(mine) is type(now):
                mine.clear()
                mine.update(now)
        return value

    def encode(self, value: Any) -> Any:
        """Return a value as data; functions of the tests are sent by number."""
        return encode(value, self._describe)

    def _answer(self, request: Any, changed: list[Any] | None = None) -> Any:
        answer = self.channel.ask(request)
        if "raise" in answer:
            error = self._error(answer["raise"])
            # In `all(map(..., f(x) == y))` this exception would end the loop of the test, with nothing compared.
            if isinstance(error, StopIteration) and request["do"] != "next":
                raise RuntimeError(f"{type(error).__name__} left a function")
            raise error
        value = self._plain(answer["ok"])
        if changed is not None and value is None and answer.get("changed"):
            changed += self._plain(answer["changed"])
        return value

    def _describe(self, value: Any) -> Any:
        if isinstance(value, StandIn):
            return {"object": value._remote_number}
        if isinstance(held := getattr(value, "_held_by", None), int):
            return {"object": held}
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return {"builtin": name}
        if isinstance(value, Iterator):
            return {"iterator": self.encode(list(value))}
        if isinstance(value, (type({}.keys()), type({}.values()), type({}.items()))):
            return self.encode(list(value))
        if isinstance(value, (collections.Counter, collections.defaultdict, collections.OrderedDict)):
            return self.encode(dict(value))
        if callable(value) and not isinstance(value, type):
            self.functions.append(value)
            return {"function": len(self.functions) - 1}
        raise TypeError(f"a {type(value).__name__} of the tests cannot be sent to the completion; use plain data")

    def _serve(self, request: Any) -> Any:
        """Call a function of the tests for the completion. Nothing else here can be asked for."""
        try:
            function = self.functions[request["function"]]
            given = self._plain(request["arguments"])
            return {"ok": self.encode(function(*given, **self._plain(request["named"])))}
        except Exception as error:
            name = next(base.__name__ for base in type(error).__mro__ if hasattr(builtins, base.__name__))
            return {"raise": {"name": name, "arguments": [message_of(error, named=False)]}}

    def _plain(self, data: Any) -> Any:
        return decode(data, self._known)

    def _known(self, kind: str, content: Any) -> Any:
        if kind == "object":
            return self._object(content)
        if kind == "builtin":
            # Only types: `eval` as an answer would run texts of the tests here.
            found = getattr(builtins, content, None)
            if isinstance(found, type):
                return found
        raise ValueError(f"{kind} describes no value")

    def _object(self, described: dict[str, Any]) -> Any:
        """Return what stands here for an object of the completion; always the same for the same object."""
        number = int(described["number"])
        if "data" not in described and number in self.remotes:
            return self.remotes[number]
        own = {"_held_by": number, "__getattr__": lambda _, name: StandIn(self, number).__getattr__(name)}
        if "error" in described:
            error = _exception(described["error"])
            made: Any = type(str(described["name"]), (error,), {"__getattr__": _attribute_of_error})
        elif "data" in described:
            data = self._plain(described["data"])
            base = base_of(data)
            if base is None or type(data) is not base:
                raise ValueError("an object was described by what is not plain data")
            return type(str(described["name"]), (base,), own)(data)
        else:
            made = StandIn(self, number)
        self.remotes[number] = made
        return made

    def _error(self, described: dict[str, Any]) -> BaseException:
        kind = self._plain(described["class"]) if "class" in described else _exception(described["name"])
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError("an exception was described by what is not an exception")
        error = kind(*self._plain(described["arguments"]))
        if "object" in described:
            error.__dict__["_held"] = StandIn(self, int(described["object"]))
        return error


class StandIn:
    """An object of the completion. It answers questions, but decides nothing.

    Args:
        names: where to ask.
        number: number of the object.
    """

    __slots__ = ("_remote_names", "_remote_number")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, names: Names, number: int) -> None:
        object.__setattr__(self, "_remote_names", names)
        object.__setattr__(self, "_remote_number", number)

    def __getattr__(self, name: str) -> Any:
        return self._remote_names.do("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_names.do("setattr", self, name, value)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._remote_names.call(self, given, named)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._remote_names.do("iter", self)
        while True:
            try:
                value = self._remote_names.do("next", iterator)
            except StopIteration:
                return
            yield value

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *_: Any) -> None:
        self.__getattr__("__exit__")(None, None, None)


def _asked(action: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._remote_names.do(action, self, *arguments)


def _between(action: str) -> Callable[..., Any]:
    def ask(self: StandIn, other: Any) -> Any:
        # With plain data as the other side, `answer - 4 == 0` would tell the completion what is right.
        return self._remote_names.do(action, self, other) if isinstance(other, StandIn) else _refused(self)

    return ask


def _refused(self: StandIn, *_: Any) -> Any:
    raise TypeError("an object of a class of the completion cannot be compared; compare its attributes or its text")


for _name in ("next", "len", "bool", "str", "repr", "getitem", "setitem"):
    setattr(StandIn, f"__{_name}__", _asked(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
    setattr(StandIn, f"__{_name.rstrip('_')}__", _between(_name))
    setattr(StandIn, f"__r{_name.rstrip('_')}__", _refused)
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "contains", "instancecheck", "subclasscheck"):
    setattr(StandIn, f"__{_name}__", _refused)


def _attribute_of_error(error: BaseException, name: str) -> Any:
    held = error.__dict__.get("_held")
    if held is None or name.startswith("__"):
        raise AttributeError(name)
    return getattr(held, name)


def _exception(name: Any) -> type[BaseException]:
    found = getattr(builtins, str(name), None)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise ValueError("an exception was described by what is not an exception")
    return found


def modules_and_tested(sources: list[str]) -> tuple[set[str], set[str]]:
    """Return the modules that tests use without importing them, and the built-in names that stand for tested functions.

    A name of the standard library that is used for its attributes only is a module. A built-in name is asked of the
    completion only if the tests would otherwise ask nothing, as in `assert sum(10, 15) == 6`: of the built-in functions
    that the tests call, those that are not `WRAPPERS`, or the only one.
    """
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    read = collections.Counter(node.id for node in nodes if isinstance(node, ast.Name) and type(node.ctx) is ast.Load)
    owners = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    owning = collections.Counter(node.id for node in owners if isinstance(node, ast.Name))
    modules = {name for name in owning if name in sys.stdlib_module_names and owning[name] == read[name]}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and type(node.ctx) is not ast.Load}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    asked = {name for name in read if not hasattr(builtins, name)} - bound - modules
    if asked or not all(hasattr(builtins, name) for name in calls):
        return modules, set()
    return modules, (calls if len(calls) == 1 else calls - WRAPPERS)
