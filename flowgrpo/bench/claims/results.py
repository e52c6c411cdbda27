"""Result files of the papers' claims: their keys, and a lock for each, so that only one process makes a result.

The name of a result file has a key of everything that shapes the result: the resolved recipes, the version and code of
the package, its model and prompts. A result that exists is not made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...configs.load import touches
from ...configs.schema import Recipe
from ...configs.yaml_text import parse_yaml
from ...parts.choice import plain
from ...training.folder.run_folder import write_text
from .result_checks import check_result

Result = dict[str, Any]

PACKAGE = Path(__file__).resolve().parents[2]
# Files of the package that no training run uses.
_NO_PART = (
    "__main__.py", "bench/", "cli/", "estimate/", "gallery/", "inference/", "text/", "training/reporting/progress.py",
    "training/text/", "worlds/building.py",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The settings of a table of claims.

    Attributes:
        results: folder of the result files; its folder `runs` holds the run folders.
        seeds: the seeds that every claim gets.
        scale: factor of the number of iterations.
        overrides: `key=value` changes to every recipe; they are part of the key of each result.
        any_code: if there is no result of this code and version, take a result of other code or another version.
        budget: hours after which no further run begins.
    """

    results: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    scale: float = 1.0
    overrides: tuple[str, ...] = ()
    any_code: bool = False
    budget: float = 1.0


def refuse_settled(name: str, overrides: Iterable[str], settled: Mapping[str, str]) -> None:
    """Refuse overrides of what `flowgrpo bench NAME` settles: its report would be wrong, or they would do nothing.

    Args:
        name: `claims` or `race`.
        overrides: `key=value` words.
        settled: key of a recipe → what to do instead.

    Raises:
        ValueError: an override gives one of the keys, a key within it, or a section around it.
    """
    for word in overrides:
        for key, instead in settled.items():
            if touches(word, key):
                section = word.partition("=")[0].strip()
                apart = f", and set other keys of {section} one by one" if key.startswith(f"{section}.") else ""
                raise ValueError(f"{word}: `flowgrpo bench {name}` itself settles {key}; {instead}{apart}")


def default_results(name: str) -> Path:
    """The folder of the results of `flowgrpo bench NAME` if the command names none."""
    return Path("runs") / name


def naming(settings: Settings, name: str) -> list[str]:
    """The words that name the results in a line of `flowgrpo bench NAME`; none for the folder that it takes by itself.

    The path stays as the user gave it, so that nothing else of a machine gets into a page.
    """
    return [] if settings.results == default_results(name) else ["--results", str(settings.results)]


@dataclass(frozen=True)
class Stamp:
    """What shapes a result besides the recipe: the package's version, code and data."""

    version: str
    code: str
    data: str


@lru_cache(maxsize=1)
def stamp() -> Stamp:
    """The stamp of the package at the time of the first call in a process."""
    sources = [p for p in _files() if p.suffix == ".py" and not _name(p).startswith(_NO_PART)]
    shipped = [p for p in _files() if _name(p).startswith("worlds/scenes/") and p.suffix != ".py"]
    version = sys.modules[__name__.partition(".")[0]].__version__
    return Stamp(version, digest(sources), digest(shipped))


def digest(files: Iterable[Path]) -> str:
    """Short hash of the names and contents of files of the package."""
    found = hashlib.sha256()
    for path in files:
        found.update(f"{_name(path)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:12]


def _files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def content(recipe: Recipe) -> dict[str, Any]:
    """A recipe without what changes no number: its name and paper, and what an adapter computes in if it is float32."""
    found = {key: value for key, value in plain(recipe).items() if key not in ("name", "paper")}
    if recipe.model.dtype != "bfloat16":
        found["model"]["lora"].pop("compute")
    return found


def key_of(recipes: Sequence[Recipe], *further: str) -> str:
    """Ten digits that change if anything changes that shapes a result."""
    used = stamp()
    said = json.dumps([[content(r) for r in recipes], used.version, used.code, used.data, further], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:10]


def provenance() -> dict[str, Any]:
    """Versions and hardware, for a result file."""
    used = stamp()
    return {"version": used.version, "code": used.code, "data": used.data, "hardware": hardware()}


def hardware() -> dict[str, Any]:
    """The machine that this process runs on."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # To ask the platform may start a process.
    name = models[0] if models else platform.processor()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": name or platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu,
        "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip


def write_result(path: Path, result: Result) -> None:
    """Write a result file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result, allow_nan=False) + "\n")


def read_result(path: Path) -> Result:
    """Read a result file.

    Raises:
        ValueError: the file is not JSON, lacks something that reports read, or has the name of another result.
    """
    try:
        found: Result = json.loads(path.read_text(encoding="utf-8"))
        check_result(path.name, found)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged or is not this result: {error}; remove the file and run the command again"
        ) from None
    return found | {"file": path.name}


def unreadable(folder: Path, pattern: str) -> list[str]:
    """Names of the files of a folder that fit a pattern and are not results."""
    return sorted(path.name for path in folder.glob(pattern) if _readable(path) is None)


def _readable(path: Path) -> Result | None:
    try:
        return read_result(path)
    except ValueError:
        return None


def find(settings: Settings, prefix: str, recipes: Sequence[Recipe], *further: str, **same: Any) -> Result | None:
    """The result of these recipes. With `any_code`, and without a result of this code, the newest of equal recipes.

    A recipe of an older schema counts as equal if it is equal with the new keys at their defaults. A result of other
    code must also have the values of `same`. A file of other code that cannot be read is passed over.

    Raises:
        ValueError: the result of this code cannot be read.
    """
    exact = settings.results / f"{prefix}-{key_of(recipes, *further)}.json"
    if exact.is_file():
        return read_result(exact)
    if not settings.any_code:
        return None
    digits = "[0-9a-f]" * 10
    others = sorted(settings.results.glob(f"{prefix}-{digits}.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for found in filter(None, map(_readable, others)):
        alike = all(found.get(key) == value for key, value in same.items())
        if alike and _contents(found["recipes"]) == [content(r) for r in recipes]:
            return found | {"other_code": True}
    return None


def _contents(stored: Iterable[str]) -> list[dict[str, Any]] | None:
    """The contents of stored recipes; None if one is not a recipe of the present schema."""
    try:
        recipes = [parse_yaml(text, "a stored recipe") for text in stored]
        for recipe in recipes:
            evaluate = recipe.get("evaluate") if isinstance(recipe, dict) else None
            if isinstance(evaluate, dict) and evaluate.get("prompts") is not None:
                evaluate.setdefault("take", "first")  # before there was a choice
        return [content(Recipe.model_validate(recipe)) for recipe in recipes]
    except ValueError:
        return None


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this process alone holds the lock of that name; a process that dies releases its lock."""
    try:
        import fcntl
    except ImportError:  # a system without such locks, where only one process may work at a time
        yield True
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
