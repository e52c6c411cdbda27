"""Names of rewards, and how a name becomes a scorer.

A name is looked up among rewards registered in this process, the built-in ones, and the entry points of
group `flowgrpo.rewards` of installed packages, in this order. `path/to/file.py:name` and
`package.module:name` need no registration.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch.nn import Module

from .base import RESERVED, Reward, RewardSpec, missing_dependency, nearest, parameters, require
from .foreign import contained
from .time_limit import TimeLimit

ENTRY_POINT_GROUP = "flowgrpo.rewards"

BUILTIN: dict[str, str] = {
    "aesthetic": "flowgrpo.rewards.aesthetic:Aesthetic",
    "answer": "flowgrpo.rewards.answer:Answer",
    "choices": "flowgrpo.rewards.choices:Choices",
    "clip_score": "flowgrpo.rewards.clip_score:ClipScore",
    "code": "flowgrpo.rewards.code:Code",
    "digit_share": "flowgrpo.rewards.digit_share:digit_share",
    "equations": "flowgrpo.rewards.equations:Equations",
    "geneval": "flowgrpo.rewards.geneval:Geneval",
    "gold": "flowgrpo.rewards.scenes:Gold",
    "hpsv2": "flowgrpo.rewards.hpsv2:HpsV2",
    "hpsv3": "flowgrpo.rewards.hpsv3:HpsV3",
    "image_classifier": "flowgrpo.rewards.image_classifier:ImageClassifier",
    "imagereward": "flowgrpo.rewards.imagereward:ImageReward",
    "jpeg_compressibility": "flowgrpo.rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "flowgrpo.rewards.jpeg:JpegIncompressibility",
    "json_output": "flowgrpo.rewards.json_output:JsonOutput",
    "judge": "flowgrpo.rewards.judge:Judge",
    "judge_logprob": "flowgrpo.rewards.judge_logprob:JudgeLogprob",
    "length": "flowgrpo.rewards.length:Length",
    "majority": "flowgrpo.rewards.majority:Majority",
    "math": "flowgrpo.rewards.math_answer:MathAnswer",
    "ocr": "flowgrpo.rewards.ocr:Ocr",
    "pickscore": "flowgrpo.rewards.pickscore:PickScore",
    "proxy": "flowgrpo.rewards.scenes_clip:Proxy",
    "remote": "flowgrpo.rewards.remote:Remote",
    "rubric": "flowgrpo.rewards.judge_rubric:Rubric",
    "safety": "flowgrpo.rewards.image_classifier:Safety",
    "siglip": "flowgrpo.rewards.siglip:Siglip",
    "sql": "flowgrpo.rewards.sql:Sql",
    "text_format": "flowgrpo.rewards.text_format:TextFormat",
    "unified_reward": "flowgrpo.rewards.judge_unified:UnifiedReward",
    "videoalign": "flowgrpo.rewards.videoalign:VideoAlign",
    "vqascore": "flowgrpo.rewards.vqascore:VqaScore",
    "win_rate": "flowgrpo.rewards.win_rate:WinRate",
}

LIGHT = frozenset({"answer", "equations", "gold", "majority", "text_format"})
"""Built-in classes whose making reads no weights and asks no server: making one checks the values of its options."""
NEEDS = {"math": ("math_verify",), "ocr": ("rapidocr", "onnxruntime")}
"""Packages that built-in classes import when one is made."""

_REGISTERED: dict[str, Callable[..., Any]] = {}
_FILES: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
F = TypeVar("F", bound=Callable[..., Any])


def register(name: str) -> Callable[[F], F]:
    """Decorator that gives a reward function or class a name for this process.

    Raises:
        ValueError: the name is empty, has a ":", or belongs to another reward.
    """
    if not name or ":" in name:
        raise ValueError(f'{name!r} cannot name a reward; use a word such as "sharpness"')
    if name in BUILTIN:
        raise ValueError(f"reward {name!r} is built in; register yours under another name")

    def keep(reward: F) -> F:
        old = _REGISTERED.get(name)
        if old is not None and _identity(old) != _identity(reward):
            raise ValueError(f"reward {name!r} is already registered by {_identity(old)}; choose another name")
        _REGISTERED[name] = reward
        return reward

    return keep


def available() -> dict[str, str]:
    """Name -> first line of the docstring, of every reward that has a name, sorted.

    Source files are parsed, not imported, so a listing stays cheap and cannot fail for a package that is
    not installed; where no docstring is found the description is where the reward lives.
    """
    found = {point.name: _describe(f"{point.module}:{point.attr}") for point in _entry_points()}
    found.update({name: _describe(target) for name, target in BUILTIN.items()})
    for name, reward in _REGISTERED.items():
        found[name] = _first_line(inspect.getdoc(reward)) or _identity(reward)
    return dict(sorted(found.items()))


def resolve(name: str) -> Callable[..., Any]:
    """The function or class that a name, `path/to/file.py:name` or `package.module:name` stands for.

    Raises:
        ValueError: there is no such name, file, module or attribute; says what there is instead.
        MissingDependency: the reward's module imports a package that is not installed.
    """
    if ":" in name:
        if not all(name.rpartition(":")[::2]):
            raise ValueError(_unnamed(name))
        return _load(name, name)
    if name in _REGISTERED:
        return _REGISTERED[name]
    if name in BUILTIN:
        return _load(BUILTIN[name], name)
    points = [point for point in _entry_points() if point.name == name]
    targets = sorted({f"{point.module}:{point.attr}" for point in points})
    if len(targets) > 1:
        raise ValueError(f"reward {name!r} is declared more than once; choose one of {', '.join(targets)}")
    if targets:
        return _load(targets[0], name)
    if name.endswith(".py"):
        defined = ", ".join(_definitions(_import_file(name))) or "none"
        raise ValueError(f"{name!r} is a file; write '{name}:NAME' with one of its functions or classes ({defined})")
    known = sorted({*_REGISTERED, *BUILTIN, *(point.name for point in _entry_points())})
    dotted = f" For a reward in a module write '{':'.join(name.rsplit('.', 1))}'." if "." in name else ""
    raise ValueError(
        f"there is no reward {name!r}{nearest(name, known)} Known: {', '.join(known)}.{dotted} "
        "Your own: 'path/to/file.py:name' or 'package.module:name'."
    )


def build(spec: RewardSpec) -> Reward:
    """Make the scorer of one recipe entry: construct a class with its options, or bind a function's.

    Raises:
        ValueError: the name cannot be resolved, or an option is unknown or missing.
        MissingDependency: the reward needs a package that is not installed.
    """
    if spec.time_limit is None:
        scorer, name, bound = construct(spec)
        return Reward(scorer, name, spec.weight, bound)
    limit = TimeLimit(spec.time_limit, spec.label or spec.name)
    # Databases and the like may be used only in the thread in which they were made.
    scorer, name, bound = limit.unlimited(partial(construct, spec))
    return Reward(scorer, name, spec.weight, bound, limit=limit)


def outline(spec: RewardSpec) -> Reward:
    """A reward as its entry and its signature tell, for checks: no instance is made, which could read weights.

    Raises:
        ValueError: as `build`; or it can not be called.
        MissingDependency: as `build`.
    """
    target, short = resolve(spec.name), spec.name.rpartition(":")[2]
    try:
        for module in NEEDS.get(spec.name, ()):
            require(module)
    except ModuleNotFoundError as error:
        raise missing_dependency(short, error) from error
    if not isinstance(target, type) or spec.name in LIGHT:
        return build(spec)
    check_options(target, spec.options, spec.label or short)
    own = getattr(target, "name", None)
    name = spec.label or (own if isinstance(own, str) and own else short)
    return Reward(_Outline(target, name), name, spec.weight)


class _Outline:
    """Stands for an instance of a reward's class, with the signature and the plain attributes that the class has."""

    def __init__(self, target: Any, name: str) -> None:
        if not any("__call__" in vars(kind) for kind in target.__mro__):
            raise ValueError(
                f"reward {name!r} is a class whose instances cannot be called; "
                "give it `__call__(self, images, prompts, **columns)`"
            )
        found = parameters(target.forward if issubclass(target, Module) else target.__call__)
        if found is not None:
            self.__signature__ = inspect.Signature(list(found.values())[1:])
        for attribute in ("whole_group", "remote", "batch_size"):
            value = getattr(target, attribute, None)
            if not isinstance(value, property) and not callable(value):
                setattr(self, attribute, value)

    def __call__(self) -> None:
        raise TypeError("an outline is never called")


def construct(spec: RewardSpec) -> tuple[Any, str, Mapping[str, Any]]:
    """What `build` makes a scorer of: a function or an instance, its name, and the options to bind to its call.

    Raises:
        ValueError: the name cannot be resolved, or an option is unknown or missing.
        MissingDependency: the reward needs a package that is not installed.
    """
    target = resolve(spec.name)
    short = spec.name.rpartition(":")[2]
    check_options(target, spec.options, spec.label or short)
    if isinstance(target, type):
        try:
            with contained():
                scorer: Any = target(**spec.options)
        except ModuleNotFoundError as error:
            raise missing_dependency(short, error) from error
        except Exception as error:
            if target.__module__.startswith("flowgrpo."):
                raise
            raise ValueError(f"reward {spec.label or short!r} cannot be made: {_told(error)}") from error
        bound: Mapping[str, Any] = {}
    else:
        scorer, bound = target, spec.options
    own = getattr(scorer, "name", None)
    return scorer, spec.label or (own if isinstance(own, str) and own else short), bound


def check_options(target: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    """Refuse options that `target` does not take, or lacks, naming the nearest that it does.

    Raises:
        ValueError: as said.
    """
    found = parameters(target)
    if found is None:
        return
    construct = isinstance(target, type)
    named = [
        p for p in found.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in RESERVED
    ]
    known = [p.name for p in named]
    anything = any(p.kind is p.VAR_KEYWORD for p in found.values())
    # A function's **columns are the prompt file's, so a misspelt option must not vanish in them.
    unknown = [key for key in options if key not in known and not (anything and construct)]
    if unknown:
        raise ValueError(
            f"reward {name!r} has no option {unknown[0]!r}{nearest(unknown[0], known)} "
            f"Options: {', '.join(known) or 'none'}."
        )
    missing = [p.name for p in named if p.default is p.empty and p.name not in options]
    if construct and missing:
        raise ValueError(f"reward {name!r} needs the option{'s' * (len(missing) > 1)} {', '.join(missing)}")


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def _identity(reward: Callable[..., Any]) -> str:
    named = reward if hasattr(reward, "__qualname__") else type(reward)
    return f"{named.__module__}:{named.__qualname__}"


def _unnamed(name: str) -> str:
    """What to say of a location without a name, or a name without a location."""
    location = name.rpartition(":")[0]
    defined = ", ".join(_definitions(_import_file(location))) if location.endswith(".py") else ""
    listed = f", with one of its functions or classes ({defined})" if defined else ""
    return f"{name!r} names no reward; write 'path/to/file.py:NAME' or 'package.module:NAME'{listed}"


def _load(target: str, name: str) -> Callable[..., Any]:
    location, _, attribute = target.rpartition(":")
    is_file = location.endswith(".py") or "/" in location or "\\" in location
    try:
        with contained(f"reward {name!r} cannot be imported: {location}", ValueError):
            module = _import_file(location) if is_file else _import_module(location)
    except ModuleNotFoundError as error:
        raise missing_dependency(name, error) from error
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
            "or a class with `__call__`"
        )
    return found  # type: ignore[no-any-return]


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"there is no module {name!r} to take a reward from; write package.module:NAME")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if not isinstance(error, ModuleNotFoundError):
            raise ValueError(f"the module {name!r} cannot be imported: {_told(error)}") from error
        if not (error.name and f"{name}.".startswith(f"{error.name}.")):
            raise
        local = Path(*name.split(".")).with_suffix(".py")
        hint = f"; there is a file, so write './{local.as_posix()}:NAME'" if local.is_file() else ""
        raise ValueError(f"there is no module {error.name!r} to take a reward from{hint}") from None


def _import_file(location: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if path.is_dir():
        raise ValueError(f"reward file {location!r} is a folder; name a file that ends in .py")
    if not path.is_file():
        beside = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise ValueError(f"reward file {location!r} does not exist (looked for {path}){nearest(path.name, beside)}")
    stamp = (path.stat().st_mtime_ns, path.stat().st_size)
    if path in _FILES and _FILES[path][0] == stamp:
        return _FILES[path][1]
    name = f"flowgrpo_plugin_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward file {location!r} is not Python source; give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a class's module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        # A module that is not installed has a message of its own; an interrupt is nobody's fault.
        if isinstance(error, ModuleNotFoundError) or not isinstance(error, (Exception, SystemExit)):
            raise
        raise ValueError(f"reward file {location!r} cannot be imported: {_told(error)}") from error
    _FILES[path] = (stamp, module)
    return module


def _told(error: BaseException) -> str:
    """An exception of a plug-in, with its file and line, in a sentence."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {said}, which is a fault of syntax; mend it"
    # The last call in a file that is no library's is the author's.
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith((_PACKAGE, "<"))]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: {said}" if own else said


_PACKAGE = str(Path(__file__).resolve().parents[1])


def _definitions(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    )


def _describe(target: str) -> str:
    module, _, attribute = target.partition(":")
    if module in sys.modules:
        return _first_line(inspect.getdoc(getattr(sys.modules[module], attribute, None))) or target
    source = _source(module)
    if source is None:
        return target
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return target
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == attribute:
            return _first_line(ast.get_docstring(node)) or target
    return target


def _source(module: str) -> Path | None:
    """Where a module's source is, found without importing its parent packages."""
    parts = module.split(".")
    search: Any = None
    spec = None
    for depth in range(1, len(parts) + 1):
        try:
            name = ".".join(parts[:depth])
            # An editable installation has a finder of its own, which knows the top of a package alone.
            spec = importlib.util.find_spec(name) if depth == 1 else PathFinder.find_spec(name, search)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        search = spec.submodule_search_locations
        if search is None and depth < len(parts):
            return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _first_line(text: str | None) -> str:
    return text.strip().splitlines()[0].strip() if text and text.strip() else ""
