"""Finding the code for a name: in a file, a module, or an installed package."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .foreign import contained, own_line

_FILES: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
CALLED = "or a class with `__call__`"


def nearest(word: str, known: Collection[str]) -> str:
    """The end of a sentence: `"; did you mean 'x'?"` with the closest known words, or a full stop if none is close."""
    within = [one for one in known if len(word) > 2 and word.lower() in one.lower()]
    close = list(dict.fromkeys([*within, *difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)]))[:3]
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else "."


def with_article(word: str) -> str:
    """A noun with "a" or "an" before it."""
    return f"{'an' if word[:1].lower() in tuple('aeiou') else 'a'} {word}"


def resolve(
    name: str, word: str, known: Mapping[str, Callable[..., Any] | str], group: str, callable_as: str = CALLED
) -> Callable[..., Any]:
    """The function or class for a name, a `path/to/file.py:name` or a `package.module:name`.

    Args:
        name: name as the recipe writes it.
        word: kind of thing that the name means, such as "reward" or "kernel", for messages.
        known: names in the package, each with its code or its `module:attribute`.
        group: group of entry points, in which installed packages declare further names.
        callable_as: a description of the classes that are allowed, for messages.

    Raises:
        ValueError: if there is no such name, file, module or attribute. The message lists what exists instead.
        ModuleNotFoundError: if its module imports a package that is not installed.
    """
    if ":" in name:
        if not all(name.rpartition(":")[::2]):
            raise ValueError(_unnamed(name, word))
        return load(name, name, word, callable_as)
    if name in known:
        found = known[name]
        return load(found, name, word, callable_as) if isinstance(found, str) else found
    points = [point for point in entry_points(group) if point.name == name]
    targets = sorted({f"{point.module}:{point.attr}" for point in points})
    if len(targets) > 1:
        raise ValueError(f"{word} {name!r} is declared more than once; choose one of {', '.join(targets)}")
    if targets:
        return load(targets[0], name, word, callable_as)
    if name.endswith(".py"):
        defined = ", ".join(_definitions(_import_file(name, word))) or "none"
        raise ValueError(f"{name!r} is a file; write '{name}:NAME' with one of its functions or classes ({defined})")
    names = sorted({*known, *(point.name for point in entry_points(group))})
    dotted = f" For {with_article(word)} in a module write '{':'.join(name.rsplit('.', 1))}'." if "." in name else ""
    raise ValueError(
        f"there is no {word} {_short(name)}{nearest(name, names)} Known: {', '.join(names)}.{dotted} "
        "Your own: 'path/to/file.py:name' or 'package.module:name'."
    )


def _short(name: str, most: int = 80) -> str:
    return repr(name) if len(name) <= most else f"{name[: most // 2]!r} …"


def entry_points(*groups: str) -> list[importlib.metadata.EntryPoint]:
    """The entry points that installed packages declare in one of the groups. Each call looks at every package."""
    found = importlib.metadata.entry_points()
    return [point for group in groups for point in found.select(group=group)]


def load(target: str, name: str, word: str, callable_as: str = CALLED) -> Callable[..., Any]:
    """The function or class at `FILE:NAME` or `MODULE:NAME`; `name` and `word` are for messages.

    Raises:
        ValueError: if there is no such file, module or attribute.
        ModuleNotFoundError: if the module imports a package that is not installed.
    """
    location, _, attribute = target.rpartition(":")
    with contained(f"{word} {name!r} cannot be imported: {location}", ValueError):
        module = _import_file(location, word) if is_file(location) else _import_module(location, word)
    try:
        found = getattr(module, attribute)
    except AttributeError:
        defined = _definitions(module)
        raise ValueError(
            f"{location!r} does not define {attribute!r}{nearest(attribute, defined)} "
            f"It defines: {', '.join(defined) or 'no functions or classes'}."
        ) from None
    if not callable(found):
        raise ValueError(
            f"{location!r} defines {attribute!r} as a {type(found).__name__}, which cannot be called; name a function, "
            f"{callable_as}"
        )
    return found  # type: ignore[no-any-return]


def _import_module(name: str, word: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"there is no module {name!r} to take {with_article(word)} from; write package.module:NAME")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if not isinstance(error, ModuleNotFoundError):
            raise ValueError(f"the module {name!r} cannot be imported: {told(error)}") from error
        if not (error.name and f"{name}.".startswith(f"{error.name}.")):
            raise
        local = Path(*name.split(".")).with_suffix(".py")
        hint = f"; there is a file, so write './{local.as_posix()}:NAME'" if local.is_file() else ""
        raise ValueError(f"there is no module {error.name!r} to take {with_article(word)} from{hint}") from None


def _import_file(location: str, word: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if path.is_dir():
        raise ValueError(f"{word} file {location!r} is a folder; name a file that ends in .py")
    if not path.is_file():
        beside = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise ValueError(f"{word} file {location!r} does not exist (looked for {path}){nearest(path.name, beside)}")
    stamp = (path.stat().st_mtime_ns, path.stat().st_size)
    if path in _FILES and _FILES[path][0] == stamp:
        return _FILES[path][1]
    name = f"flowgrpo_plugin_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{word} file {location!r} is not Python source; give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up by name.
    sys.modules[name] = module
    # The file may import modules beside it, now or later. They come last, so that none hides an installed package.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        # A module that is not installed has its own message, and an interrupt is not an error of the file.
        if isinstance(error, ModuleNotFoundError) or not isinstance(error, (Exception, SystemExit)):
            raise
        raise ValueError(f"{word} file {location!r} cannot be imported: {told(error)}") from error
    _FILES[path] = (stamp, module)
    return module


def told(error: BaseException, also: str | None = None) -> str:
    """A sentence about an exception of a plug-in, with its file and line; `also` as for `own_line`."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {said}, which is a syntax error; correct it"
    own = own_line(error, also)
    return said if own is None else f"{Path(own.filename).name}, line {own.lineno}: {said}"


def _definitions(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    )


def describe(target: str) -> str:
    """First line of the docstring at `MODULE:NAME`, read from its source without importing it."""
    module, _, attribute = target.partition(":")
    if module in sys.modules:
        return first_line(inspect.getdoc(getattr(sys.modules[module], attribute, None))) or target
    source = _source(module)
    if source is None:
        return target
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return target
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == attribute:
            return first_line(ast.get_docstring(node)) or target
    return target


def source_of(name: str) -> Path | None:
    """The file of the code that `FILE:NAME`, `MODULE:NAME` or `FILE` names, found without importing it; else None."""
    location = name.rpartition(":")[0] or name
    if is_file(location):
        return Path(location).expanduser().resolve()
    found = _source(location) if all(part.isidentifier() for part in location.split(".")) else None
    return None if found is None else found.resolve()


def is_file(location: str) -> bool:
    """Whether the place of a piece of code is a file; else it is a module."""
    return location.endswith(".py") or "/" in location or "\\" in location


def module_of(location: str) -> str | None:
    """The name under which a file of plug-ins was imported; None if the place is not such a file."""
    if not is_file(location):
        return None
    kept = _FILES.get(Path(location).expanduser().resolve())
    return None if kept is None else kept[1].__name__


def home_of(found: Any) -> str | None:
    """The module that defines a function, a class, or the class of an object; None for some code that is not Python."""
    while isinstance(found, partial):
        found = found.func
    home = getattr(found, "__module__", None)
    return home if isinstance(home, str) else None


def refuse_library(found: Callable[..., Any], name: str, word: str) -> None:
    """Refuse a function or class of Python itself, such as `subprocess:Popen`, before anything calls it.

    Raises:
        ValueError: it is part of Python.
    """
    if ":" in name and (home_of(found) or "").partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(f"{name!r} is a part of Python, and no {word}; name {with_article(word)} of your own")


def _source(module: str) -> Path | None:
    """The file with a module's source, found without importing its parent packages."""
    parts = module.split(".")
    search: Any = None
    spec = None
    for depth in range(1, len(parts) + 1):
        try:
            name = ".".join(parts[:depth])
            # An editable installation has its own finder, which knows only the top of a package.
            spec = importlib.util.find_spec(name) if depth == 1 else PathFinder.find_spec(name, search)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        search = spec.submodule_search_locations
        if search is None and depth < len(parts):
            return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def first_line(text: str | None) -> str:
    """The first line that is not blank, or an empty text."""
    return text.strip().splitlines()[0].strip() if text and text.strip() else ""


def _unnamed(name: str, word: str) -> str:
    """The message for a location without a name, or a name without a location."""
    location = name.rpartition(":")[0]
    defined = ", ".join(_definitions(_import_file(location, word))) if location.endswith(".py") else ""
    listed = f", with one of its functions or classes ({defined})" if defined else ""
    return f"{name!r} names no {word}; write 'path/to/file.py:NAME' or 'package.module:NAME'{listed}"
