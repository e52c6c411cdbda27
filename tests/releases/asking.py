"""How released code is asked for numbers. `ask.py` is the command, and the other files here have the questions."""

from __future__ import annotations

import ast
import importlib
import math
import subprocess
import sys
import tempfile
import textwrap
import typing
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

NUMBERS = Path(__file__).parent / "numbers"
SHAPE = (2, 3, 2, 2)
STEPS, SHIFT = 8, 3.0

Names = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """What is asked of a release.

    Attributes:
        repository: OWNER/NAME.
        commit: of the repository.
        file: in the repository.
        names: functions and classes that are taken from the file. A method `CLASS.METHOD` becomes the function METHOD.
        ask: called with the names; returns inputs and outputs by name.
        lines: first and last line of statements within a function, which the name `run` runs on given names.
        beside: another file, and what is taken from it, too.
        statements: a function, and the first and last number of those of its statements that `run` runs; for a file
            whose lines are not known.
        block: a function, and two names that a block deep within it assigns; `run` runs the block from the first
            assignment of the first name to the last assignment of the second one.
        package: files of the same folder that the file imports. If there are any, the whole file is imported.
    """

    repository: str
    commit: str
    file: str
    names: tuple[str, ...]
    ask: Callable[[Names], dict[str, Any]]
    lines: tuple[int, int] | None = None
    beside: tuple[str, tuple[str, ...]] | None = None
    statements: tuple[str, int, int] | None = None
    block: tuple[str, str, str] | None = None
    package: tuple[str, ...] = ()

    @property
    def source(self) -> dict[str, Any]:
        """The place of what is asked, as it stands beside the numbers."""
        found: dict[str, Any] = {"repository": self.repository, "commit": self.commit, "file": self.file}
        if self.names or self.lines is None:
            found["names"] = list(self.names)
        for name, part in (("lines", self.lines), ("statements", self.statements), ("block", self.block)):
            if part is not None:
                found[name] = list(part)
        if self.beside is not None:
            found["beside"] = [self.beside[0], list(self.beside[1])]
        if self.package:
            found["package"] = list(self.package)
        return found


def drawn(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed))


def table() -> Tensor:
    """A shifted table of noise levels, as DanceGRPO and MixGRPO make it: float32, from 1 to 0."""
    times = torch.linspace(1, 0, STEPS + 1)
    return SHIFT * times / (1 + (SHIFT - 1) * times)


def plain(value: Any) -> Any:
    """A value as JSON has it; a float32 is written so that it reads back to the last bit."""
    if isinstance(value, Tensor):
        return value.detach().double().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def shown(clone: Path, commit: str, file: str) -> str:
    """The text of a file of a commit."""
    if not clone.is_dir():
        raise SystemExit(f"{clone} is no folder; clone the repository {clone.name} there, or name other questions")
    found = subprocess.run(["git", "-C", str(clone), "show", f"{commit}:{file}"], capture_output=True)
    if found.returncode:
        raise SystemExit(f"{clone}: {found.stderr.decode().strip()}; fetch the commit {commit}")
    return found.stdout.decode()


def chosen(text: str, names: tuple[str, ...], where: str) -> ast.Module:
    """The functions, classes and methods of these names."""
    tree = ast.parse(text)
    defined = {one.name: one for one in tree.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
    methods = {
        f"{outer}.{one.name}": one
        for outer, definition in defined.items()
        for one in definition.body
        if isinstance(one, ast.FunctionDef)
    }
    found = {**defined, **methods}
    if missing := sorted(set(names) - set(found)):
        raise SystemExit(f"{where} has no {', '.join(missing)}")
    tree.body = [found[name] for name in names]
    return tree


def taken(clone: Path, question: Question) -> Names:
    """The functions and classes of a question, made from the file of its commit."""
    if question.package:
        return imported(clone, question)

    def randn_tensor(shape: Any, **options: Any) -> Tensor:
        return torch.randn(shape)

    names: Names = {
        **vars(typing), "torch": torch, "math": math, "np": np, "deque": deque, "dataclass": dataclass, "F": functional,
        "randn_tensor": randn_tensor, "FlowMatchEulerDiscreteScheduler": object, "main_print": lambda *words: None,
        "__name__": __name__,
    }  # fmt: skip
    text = shown(clone, question.commit, question.file)
    for file, wanted in ((question.file, question.names), *([question.beside] if question.beside else ())):
        part = text if file == question.file else shown(clone, question.commit, file)
        exec(compile(chosen(part, wanted, f"{file} of {question.repository}"), file, "exec"), names)
    if (part := to_run(text, question)) is not None:

        def run(**given: Any) -> Names:
            exec(compile(part, question.file, "exec"), made := names | given)
            return made

        names["run"] = run
    return names


def imported(clone: Path, question: Question) -> Names:
    """The names of a file that is imported whole, with the files beside it."""
    folder, _, file = question.file.rpartition("/")
    with tempfile.TemporaryDirectory() as place:
        package = Path(place) / f"released_{Path(file).stem}"
        package.mkdir()
        (package / "__init__.py").touch()
        for name in (file, *question.package):
            (package / name).write_text(shown(clone, question.commit, f"{folder}/{name}"), encoding="utf-8")
        sys.path.insert(0, place)
        try:
            module = importlib.import_module(f"{package.name}.{Path(file).stem}")
        finally:
            sys.path.remove(place)
    return {name: getattr(module, name) for name in question.names}


def to_run(text: str, question: Question) -> ast.Module | None:
    """The statements that the name `run` runs, if there are any."""
    if question.lines is not None:
        first, last = question.lines
        return ast.parse(textwrap.dedent("".join(text.splitlines(keepends=True)[first - 1 : last])))
    if question.block is not None:
        function, first_name, last_name = question.block
        found = chosen(text, (function,), question.file)
        found.body = block_of(found.body[0], first_name, last_name)
        return found
    if question.statements is None:
        return None
    function, first, last = question.statements
    found = chosen(text, (function,), question.file)
    definition = found.body[0]
    assert isinstance(definition, ast.FunctionDef)
    found.body = definition.body[first : last + 1]
    return found


def block_of(tree: ast.AST, first: str, last: str) -> list[ast.stmt]:
    """The statements between the assignments of two names, in the one block that assigns both."""
    bodies = [body for node in ast.walk(tree) for body in (getattr(node, "body", None), getattr(node, "orelse", None))]
    found = []
    for body in bodies:
        assigned = [_assigned(one) for one in body] if isinstance(body, list) else []
        starts, ends = ([k for k, names in enumerate(assigned) if name in names] for name in (first, last))
        if starts and ends:
            found.append(body[starts[0] : ends[-1] + 1])
    if len(found) != 1:
        raise SystemExit(f"{len(found)} blocks assign {first} and {last}; give two names that one block assigns")
    return found[0]


def _assigned(statement: ast.stmt) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
