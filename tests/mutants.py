"""Mutation run: change one operator, sign, bound or number of `flowgrpo.core` at a time; see whether a test notices.

    python tests/mutants.py                       # every file of core, each with the tests that import it
    python tests/mutants.py selection trees       # some files
    python tests/mutants.py --out report.json

Each mutant lives in a forked process, which runs the test files that import its module (and those in `MORE`) until the
first failure. What survives is listed with its place; the exit status is 1 if anything did that `EQUIVALENT` does not
explain. POSIX only, as it forks.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "flowgrpo" / "core"
SECONDS = 120
MORE: dict[str, list[str]] = {
    "addressing": ["tests/samplers/test_rollout.py"],
    "grouped": ["tests/core/test_baselines.py", "tests/core/test_outcomes.py"],
}
"""Test files of a module beside those of `tests/core` that import it."""
EQUIVALENT: dict[str, str] = {}
"""Name of a mutant → why it changes nothing that could be asked for."""

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.Gt: ast.Lt, ast.Lt: ast.Gt, ast.GtE: ast.Lt, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_DROPPED = {"clamp", "clamp_", "detach", "abs", "square", "sqrt", "nan_to_num", "masked_fill"}
"""Methods whose call is replaced by the object they are called on."""
_TWINS = {"amax": "amin", "amin": "amax", "max": "min", "min": "max", "minimum": "maximum", "maximum": "minimum",
          "sum": "mean", "mean": "sum"}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: where it is, the expression around it before and after, and the whole module with it."""

    place: str  # module.function
    line: int
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        """`module.function: before → after`, which survives moves of lines."""
        return f"{self.place}: {self.before} → {self.after}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file, outside of docstrings, annotations and messages of errors."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for number, node in enumerate(_numbered(tree)):
        for change in range(_changes(node)):
            other = copy.deepcopy(tree)
            target = list(_numbered(other))[number]
            function, around = _place(other, target)
            before = _head(around)
            other = ast.fix_missing_locations(_Mutation(target, change).visit(other))
            place = f"{path.stem}.{function}" if function else path.stem
            yield Mutant(place, getattr(node, "lineno", 0), before, _head(around), ast.unparse(other))


def _place(tree: ast.AST, target: ast.AST) -> tuple[str, ast.AST]:
    """The function of `target` ("" outside of one) and the smallest node around it whose text it has only once."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    above = [target]
    while above[-1] in parents:
        above.append(parents[above[-1]])
    function = next((node for node in above if isinstance(node, ast.FunctionDef)), None)
    text = ast.unparse(function or tree)
    for node in above[1:]:
        if isinstance(node, ast.stmt) or (isinstance(node, ast.expr) and text.count(ast.unparse(node)) == 1):
            return function.name if function else "", node
    raise AssertionError("a change outside of any statement")


def _head(node: ast.AST) -> str:
    """The text of a node, of a block its first line."""
    return ast.unparse(node).splitlines()[0]


def _numbered(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that may be changed, in a fixed order."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            continue
        if _changes(node):
            yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            children = value if isinstance(value, list) else [value]
            stack += [child for child in reversed(children) if isinstance(child, ast.AST)]


def _changes(node: ast.AST) -> int:
    """How many mutants a node has."""
    if isinstance(node, (ast.BinOp, ast.BoolOp)):
        return int(type(node.op) in _SWAPS and not _is_type(node))
    if isinstance(node, ast.Compare):
        return int(len(node.ops) == 1 and type(node.ops[0]) in _SWAPS)
    if isinstance(node, ast.UnaryOp):
        return int(isinstance(node.op, (ast.USub, ast.Not, ast.Invert)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return int(node.func.attr in _DROPPED) + int(node.func.attr in _TWINS)
    if isinstance(node, ast.Constant):
        return int(type(node.value) in (int, float))
    return 0


def _is_type(node: ast.AST) -> bool:
    """Whether `a | b` is of types, as in an alias."""
    return any(isinstance(part, ast.Constant) and part.value is None for part in ast.walk(node))


class _Mutation(ast.NodeTransformer):
    """Changes one node."""

    def __init__(self, target: ast.AST, change: int) -> None:
        self.target, self.change = target, change

    def visit(self, node: ast.AST) -> Any:
        """The changed node in place of the target."""
        if node is not self.target:
            return self.generic_visit(node)
        return self._changed(node)

    def _changed(self, node: Any) -> ast.AST:
        if isinstance(node, (ast.BinOp, ast.BoolOp)):
            node.op = _SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare):
            node.ops = [_SWAPS[type(node.ops[0])]()]
        elif isinstance(node, ast.UnaryOp):
            return node.operand
        elif isinstance(node, ast.Constant):
            return ast.Constant(node.value + 1)
        elif node.func.attr in _DROPPED and self.change == 0:
            return node.func.value
        else:
            node.func.attr = _TWINS[node.func.attr]
        return node


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a source of ours."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


def run(module: str, source: str, tests: list[str]) -> str:
    """Run tests on a source of a module in a process of its own: `killed`, `survived` or `timed out`."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setsid()
            void = os.open(os.devnull, os.O_WRONLY)
            os.dup2(void, 1)
            os.dup2(void, 2)
            import pytest

            sys.meta_path.insert(0, _Finder(f"flowgrpo.core.{module}", CORE / f"{module}.py", source))
            # Tests of core need no fixture of conftest.py, whose imports would cost every mutant seconds.
            arguments = ["-x", "-q", "-p", "no:cacheprovider", "--noconftest", "-W", "ignore", *tests]
            code = int(pytest.main(arguments))
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out"


def tests_of(module: str) -> list[str]:
    """Test files of a module, relative to the root: its own first, then those of core that import it."""
    imported = re.compile(rf"flowgrpo\.core(\.{module}\b| import .*\b{module}\b)")
    files = sorted(
        (ROOT / "tests" / "core").glob("test_*.py"), key=lambda file: (file.stem != f"test_{module}", file.stem)
    )
    found = [str(file.relative_to(ROOT)) for file in files if imported.search(file.read_text(encoding="utf-8"))]
    return [*found, *MORE.get(module, [])]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="files of flowgrpo/core, without .py; all if none")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args()
    os.chdir(ROOT)
    # Loaded once and inherited by every child; the package itself is not.
    import hypothesis
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    # A counterexample is all that is asked for, not the smallest one.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", phases=phases, database=None, derandomize=True)
    hypothesis.settings.load_profile("mutants")
    names = given.modules or sorted(path.stem for path in CORE.glob("*.py") if path.stem != "__init__")
    counts: dict[str, dict[str, int]] = {}
    survivors = []
    for name in names:
        path, tests = CORE / f"{name}.py", tests_of(name)
        if not path.is_file() or not tests:
            print(f"{name}: no such module of core, or it has no test file")
            return 2
        if run(name, path.read_text(encoding="utf-8"), tests) != "survived":
            print(f"{name}: its tests fail as it is: {' '.join(tests)}")
            return 2
        started = time.monotonic()
        found = {"killed": 0, "timed out": 0, "survived": 0, "equivalent": 0}
        for mutant in mutants_of(path):
            verdict = run(name, mutant.source, tests)
            if verdict == "survived" and mutant.name in EQUIVALENT:
                verdict = "equivalent"
            found[verdict] += 1
            if verdict == "survived":
                survivors.append({"place": f"{name}.py:{mutant.line}", "before": mutant.before, "after": mutant.after})
                print(f"  survived  {name}.py:{mutant.line}  {mutant.before}  →  {mutant.after}", flush=True)
        counts[name] = found
        counted = ", ".join(f"{count} {verdict}" for verdict, count in found.items())
        print(f"{name}: {counted}; {time.monotonic() - started:.0f} s", flush=True)
    if given.out is not None:
        text = json.dumps({"counts": counts, "survivors": survivors}, indent=2, ensure_ascii=False)
        given.out.write_text(text + "\n", encoding="utf-8")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
