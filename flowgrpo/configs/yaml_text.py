"""Reading YAML: one loader for all YAML that the package reads. It is stricter than YAML, and names the line.

A file may come from a stranger. So the loader bounds the size of a text, the depth, the entries and the length of a
number: no text makes it run for long, and what it returns can be walked by recursion.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

LARGEST = 100_000
"""Largest number of entries of a document; entries of an anchor count at every use."""
DEEPEST = 50
"""Largest number of mappings and lists within each other. A recipe of the package has fewer than ten."""
LONGEST = 2**20
"""Largest number of characters of a text. The loader needs a few seconds for so many."""
SHORT = 1000
"""Largest number of characters of a value that is remembered."""
LONGEST_NUMBER = 400
"""Largest number of characters of a number. The largest float has 309 digits before the point."""


class Loader(yaml.SafeLoader):
    """Reads `1e-3` as a number, like YAML 1.2; YAML 1.1 reads it as text. A key may occur only once in a mapping."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node of the document.

        Raises:
            ConstructorError: if it lies too deep.
        """
        if self._depth > DEEPEST:
            mark = self.peek_event().start_mark
            raise ConstructorError(None, None, f"is nested more than {DEEPEST} levels deep; write fewer levels", mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping.

        Raises:
            ConstructorError: if a key occurs twice.
        """
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in seen:
                first = "" if seen[name] == line else f", first in line {seen[name]}"
                raise ConstructorError(
                    None, None, f"the key {key.value!r} stands twice{first}; keep one of them", key.start_mark
                )
            seen[name] = line
        return super().construct_mapping(node, deep=deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """A value. Text that looks like a date or a number but is none is a fault, with its place."""
        number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if number and len(node.value) > LONGEST_NUMBER:
            raise ConstructorError(
                None, None, f"{node.value!r:.60} is a number of {len(node.value)} digits; quote it to make it text",
                node.start_mark,
            )  # fmt: skip
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, OverflowError) as error:
            what = "a date" if node.tag.endswith("timestamp") else "a number"
            why = str(error).partition(";")[0]
            raise ConstructorError(
                None, None, f"{node.value!r:.60} looks like {what} but is none ({why}); quote it to make it text",
                node.start_mark,
            ) from None  # fmt: skip

    def get_single_node(self) -> Any:
        """The document; it is refused if its anchors would make it too large or too deep."""
        node = super().get_single_node()
        if node is None:
            return None
        size, height = _size(node, {})
        if size > LARGEST or height > DEEPEST:
            what = f"{LARGEST:,} entries" if size > LARGEST else f"{DEEPEST} levels"
            raise ConstructorError(
                None, None, f"its anchors multiply to more than {what}; use fewer anchors", node.start_mark
            )
        return node


class Dumper(yaml.SafeDumper):
    """Quotes text that `Loader` would read as a number."""


# Each digit can be matched in one way only; otherwise a long row of digits takes time with the square of its length.
_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
for _side in (Loader, Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str, name: str) -> Any:
    """The value of a YAML document.

    Args:
        text: the document.
        name: name of the file, for messages.

    Raises:
        ValueError: if the text is not YAML, a key occurs twice, or the text is too long, too deep, or made too large
            by anchors. The message names file and line.
    """
    if len(text) > LONGEST:
        raise ValueError(f"{name} has {len(text):,} characters, and a file of YAML may have {LONGEST:,}; {_TOO_LONG}")
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{name}{_place(error, text)}: {_problem(error)}") from None


_TOO_LONG = "name a recipe, or the config.yaml of a run, and put long texts into files of their own"


def parse_yaml_value(text: str) -> Any:
    """A value from the command line, new at each call; raises ValueError if it is not YAML."""
    if len(text) > LONGEST:
        raise ValueError(f"{text!r:.80} has {len(text):,} characters, and a value may have {LONGEST:,}; shorten it")
    try:
        return copy.deepcopy(_read_once(text)) if len(text) <= SHORT else yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(
            f"{text!r:.80} is not a YAML value ({_problem(error).removeprefix('is not YAML: ')}); quote it"
        ) from None


@lru_cache(maxsize=4096)
def _read_once(text: str) -> Any:
    """The value of a text. Many recipes are read with the same overrides, and reading takes a millisecond."""
    return yaml.load(text, Loader)


def in_one_line(value: Any) -> str:
    """A value of a recipe as YAML on one line."""
    text: str = yaml.dump(
        value, Dumper=Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10_000
    )
    return text.removesuffix("\n").removesuffix("\n...")


def read_yaml_mapping(path: Path, holds: str) -> dict[Any, Any]:
    """The mapping in a YAML file.

    Args:
        path: path of the file.
        holds: what it should hold, for messages.

    Raises:
        ValueError: if the file cannot be read, or holds something else.
    """
    return as_mapping(parse_yaml(read_text(path), str(path)), str(path), holds)


def as_mapping(value: Any, name: str, holds: str) -> dict[Any, Any]:
    """A value that should be a mapping; raises ValueError if it is not one."""
    if value is None:
        raise ValueError(f"{name} is empty, not a mapping; write {holds}")
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds {kind_of(value)}, not a mapping; write {holds}")
    return value


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; raises ValueError if the file is not UTF-8, or too long for a file of YAML."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if len(text) > LONGEST:
        raise ValueError(f"{path} has more than {LONGEST:,} characters, too many for a file of YAML; {_TOO_LONG}")
    return text


def kind_of(value: Any) -> str:
    """The name of the type of a value that was read from YAML or JSON."""
    names = {
        bool: "true or false",
        list: "a list",
        dict: "a mapping",
        str: "a text",
        int: "a number",
        float: "a number",
    }
    return "nothing" if value is None else names.get(type(value), "a date")


def _size(node: Any, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Number of entries of a document, and number of its levels; entries of an anchor count at every use."""
    if id(node) in known:
        counted = known[id(node)]
        if counted is None:
            raise ConstructorError(None, None, "an anchor contains itself; take it out", node.start_mark)
        return counted
    known[id(node)] = None
    inner = node.value if isinstance(node, yaml.CollectionNode) else []
    parts = [part for entry in inner for part in (entry if isinstance(entry, tuple) else (entry,))]
    sizes = [_size(part, known) for part in parts]
    counted = 1 + sum(size for size, _ in sizes), max((1 + height for _, height in sizes), default=0)
    known[id(node)] = counted
    return counted


def _place(error: Exception, text: str) -> str:
    if isinstance(error, ReaderError):
        return f", line {1 + text.count(chr(10), 0, error.position)}"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return "" if mark is None else f", line {mark.line + 1}"


def _problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"its anchors are nested too deeply; write at most {DEEPEST} levels"
    if isinstance(error, ReaderError):
        return f"is not YAML: the character #x{int(error.character):04x} is not allowed"
    said = " ".join(str(getattr(error, "problem", None) or error).split()).replace("tag:yaml.org,2002:", "!!")
    context = getattr(error, "context", None)
    said = f"{said}, {context}" if context else said
    mend = "; indent with spaces, not with a tab" if "'\\t'" in said else ""
    if "could not determine a constructor" in said:
        return f"{said.replace('could not determine a constructor for', 'nothing of ours has')}; leave the tag out"
    return said if isinstance(error, ConstructorError) else f"is not YAML: {said}{mend}"
