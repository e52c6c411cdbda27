"""Mutation run: change one operator, sign, bound or number of `flowgrpo.core` at a time, and see if a test fails.

    python tests/mutants.py                       # every file of core, each with the tests that import it
    python tests/mutants.py selection trees       # some files
    python tests/mutants.py --out report.json

Each mutant runs in a forked process. The process runs the test files that import the mutant's module (and the files in
`MORE`) until the first failure. The tests are collected once, and the mutant's code replaces the code of the functions.
If a mutant survives this, a new process imports its module again and runs the tests again. A mutant that survives both
is listed with its place. The exit status is 1 if a mutant survived that `EQUIVALENT` does not explain. The script
forks, so it runs on POSIX systems only.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "flowgrpo" / "core"
SECONDS = 60
"""Seconds of processor time, after which a mutant is taken to be in an endless loop."""
MORE: dict[str, list[str]] = {
    "addressing": ["tests/samplers/test_rollout.py"],
    "grouped": ["tests/core/test_baselines.py", "tests/core/test_outcomes.py"],
}
"""Further test files of a module, besides the files of `tests/core` that import it."""
EQUIVALENT: dict[str, str] = {
    "advantages._length_offset: above.nan_to_num(«0.0 → 1.0»)": "the weight of a missing value is 0",
    "advantages.anchored_advantages: torch.where(whole > 0, k * own / whole, «1.0 → 2.0»)": "it is clamped to 1",
    "advantages.filled_rewards: group_moments(values, index, count, ddof=«0 → 1»)": "the deviation is not read",
    "advantages.group_moments: count.clamp(min=«1 → 2»)": "of one value, nothing is above the minimum: 0 is divided",
    "advantages.multi_reward_advantages: group_moments(values, index, num_groups, ddof=«1 → 2»)": (
        "the deviation is not read"
    ),
    "baselines.beta_advantages: data.moments(«0 → 1»)": "the deviation is not read",
    "baselines.beta_advantages: torch.where(moments.degenerate, «0.0 → 1.0», (-log_density).exp())": (
        "it scales a difference of 0"
    ),
    (
        "baselines.beta_advantages: "
        "group_moments(rate, torch.zeros_like(data.index[:1]).expand(data.count), «1 → 2», 0)"
    ): "a second group is empty, and only the first is read",
    "bounds.balance_sums: torch.where(kept, as_precise(log_ratio), «0.0 → 1.0»)": "the advantage there is 0",
    "bounds._dcpo_bounds: «3 → 4» * LOG_LIMIT": "both bounds are far beyond the dual clip, and short of overflow",
    "bounds._dcpo_holds_back: adv < «0 → 1»": "above 0 what is beyond the ceiling is held back already",
    "bounds.dcpo: adv < «0 → 1»": "above 0 the ratio is within the ceiling already, and at 0 nothing counts",
    "combination.uncertainty_weighted_rewards: group_moments(values, one, «1 → 2», ddof=0)": (
        "a second group is empty, and only the first is read"
    ),
    "comparisons.win_rates: torch.eye(preference.shape[-«1 → 2»], dtype=torch.bool, device=preference.device)": (
        "it is square"
    ),
    "controllers.update: min(move, «700.0 → 701.0»)": "both are far beyond any coefficient, and short of overflow",
    "diagnostics.degenerate_groups: group_moments(values, index, num_groups, ddof=«1 → 2»)": (
        "the deviation is not read"
    ),
    "diagnostics.step_statistics: torch.where(kept, ratio.flatten(), «0.0 → 1.0»)": "it is multiplied by 0 in the end",
    "diagnostics.step_statistics: torch.where(kept, 2 * steps.long() + (sign < 0), «0 → 1»)": (
        "what is added there is 0"
    ),
    (
        "diagnostics.summarise: "
        "{'': «stats.sum → stats.mean»(1), **{f'_{name}': stats[:, i] for i, name in enumerate(SIGNS)}}"
    ): "half of every sum, and only their ratios are read",
    "diagnostics.summarise: view.unbind(«- → »1)": "the last of two dimensions",
    "forward_process.diffusion_nft: («1 → 2», beta * v + (1.0 - beta) * old)": "only its sign is read",
    "forward_process.diffusion_nft: -«1 → 2»": "only its sign is read",
    "forward_process.flow_dpo: arg_extreme(advantage.masked_fill(left_out, -torch.inf), index, count, «1.0 → 2.0»)": (
        "only its sign is read"
    ),
    "forward_process.flow_dpo: -«1.0 → 2.0»": "only its sign is read",
    "grouped.cells: group_index(index * count «+ → -» position, len(index), index.device)": (
        "another number for each pair, still one of its own"
    ),
    "guards.likelihood_guard: torch.where(kept, logp, «0.0 → 1.0»)": (
        "what is not kept is left out of the mean and of the penalty"
    ),
    "guards.likelihood_guard: torch.where(kept, old_logp.detach(), «0.0 → 1.0»)": (
        "what is not kept is left out of the mean and of the penalty"
    ),
    "guards.likelihood_guard: fixed = «fall.detach() → fall»": "it decides a comparison, which has no gradient",
    "neighbours.neighbour_log_ratio: change.where(same, «0.0 → 1.0»)": "its share is 0",
    "objectives._gradient_scale: «log_ratio.detach() → log_ratio» + leaf": (
        "only the gradient of the leaf is asked for"
    ),
    "objectives._gradient_scale: «inputs.logp.detach() → inputs.logp» + leaf": (
        "only the gradient of the leaf is asked for"
    ),
    "objectives._prepare: torch.where(kept, _columns(advantages.detach(), logp, 'advantages'), «0.0 → 1.0»)": (
        "what is not kept is not counted in the end"
    ),
    "objectives._prepare: torch.where(kept, logp, «0.0 → 1.0»)": "what is not kept is not counted in the end",
    "objectives._prepare: torch.where(kept, old_logp.detach().to(logp.dtype), «0.0 → 1.0»)": (
        "what is not kept is not counted in the end"
    ),
    "objectives._prepare: torch.where(kept, _columns(weight.detach(), logp, 'weight').to(logp.dtype), «0.0 → 1.0»)": (
        "what is not kept is not counted in the end"
    ),
    "objectives._prepare: «log_ratio.detach().nan_to_num → log_ratio.nan_to_num»": (
        "a rejected entry's loss is multiplied by 0"
    ),
    "objectives._prepare: torch.where(used, logp, «0.0 → 1.0»)": "a rejected entry's loss is multiplied by 0",
    "objectives.gaussian_kl: width.where(stochastic, «1.0 → 2.0»)": (
        "only so that a branch that is dropped stays finite"
    ),
    "objectives.held_columns: _prepare(«logp.detach() → logp», old_logp, advantages, mask, None)": (
        "the result is bool, which has no gradient"
    ),
    "offpolicy.nft: torch.where(wrong, adv, «- → »1.0)": "only so that a branch that is dropped stays finite",
    "offpolicy.nft: -«1.0 → 2.0»": "only so that a branch that is dropped stays finite",
    "outcomes._entropy: size.clamp(min=«1 → 2»)": "one row brings no surprise, and 0 is divided",
    "outcomes._quantile: data.moments(«0 → 1»)": "the deviation is not read",
    "outcomes.consistency_advantages: group_moments(level, batch, «1 → 2», ddof)": (
        "a second group is empty, and only the first is read"
    ),
    "preference_losses.pairs_of: arg_extreme(values.masked_fill(missing, -torch.inf), index, count, «1.0 → 2.0»)": (
        "only its sign is read"
    ),
    "preference_losses.pairs_of: -«1.0 → 2.0»": "only its sign is read",
    "answer_losses.real: logits.new_zeros(2 * count).scatter_reduce(0, cell, «logits.detach() → logits», 'amax')": (
        "the gradient of what is taken off and added again cancels out"
    ),
    "prefix_tree._prefix_nodes: max(index) + «1 → 2»": "a node that no row has",
    "prefix_tree._prefix_nodes: (node, int(tokens[t - 1]), «- → »1)": "it is the same in all keys of this kind",
    "prefix_tree._prefix_nodes: (node, int(tokens[t - 1]), -«1 → 2»)": "it is the same in all keys of this kind",
    "prefix_tree._values: data.values.repeat(depth, «1 → 2»)": "only the first column is read",
    "prefix_tree._values: group_moments(data.values.repeat(depth, 1), nodes.flatten(), count, «0 → 1»)": (
        "the deviation is not read"
    ),
    "prefix_tree.prefix_tree_advantages: :«- → »1": "where no row leaves, the value does not change",
    "process.future_rewards: rewards[:, «0 → 1»]": "only its shape is read",
    "process.turning_point_rewards: -«1.0 → 2.0»": "only its sign is read",
    "process.turning_point_rewards: gain.sign() «* → /» rest.sign() > 0": "where the rest is 0, what is added is 0",
    "prompt_memory.observe: [0.0] * «4 → 5»": "zip stops at the shorter one",
    "prompt_memory.probabilities: max((score for score in known if score is not None), default=«1.0 → 2.0»)": (
        "it is the score of all prompts then"
    ),
    "subsets.degenerate_rows: group_moments(as_precise(rewards)[:, None], index, count, ddof=«0 → 1»)": (
        "the deviation is not read"
    ),
    "subsets.widest: group_moments(precise[:, None], index, count, ddof=«0 → 1»)": "the deviation is not read",
    "subsets.widest: (moments.minimum «+ → -» moments.offset)[index, 0]": (
        "another centre near the values, which no variance depends on"
    ),
    "subsets.widest: torch.where(valid, precise - (moments.minimum + moments.offset)[index, 0], «0.0 → 1.0»)": (
        "it is added where nothing is read"
    ),
    "surrogates.cispo: log_bounds(low, «0.0 → 1.0»)": "the upper bound is not read",
    (
        "surrogates.cispo: "
        "def cispo(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor, *, low: Bound=«1.0 → 2.0», "
        "high: Bound=5.0) -> Tensor:"
    ): "from 1 on there is no lower bound",
    "trackers.__init__: [0.0, 0.0, «0.0 → 1.0», 0.0]": "the mean of no samples is not read",
    "trackers.advantages: torch.where(count > 0, (moments.minimum + moments.offset)[:, 0], «0.0 → 1.0»)": (
        "the mean of no samples counts for nothing"
    ),
    "trackers.advantages: (samples + count).clamp(min=«1 → 2»)": "of one sample the sum of squares is 0",
    "trackers.advantages: torch.where(squares > 0, 1.0 / (deviation + self.eps), «0.0 → 1.0»)": (
        "it scales a difference of 0"
    ),
    "trackers.read: prompts.new_zeros(«1 → 2»)": "no place is beyond the first of them",
    "trees._fuse: torch.where(peak.isneginf(), «0.0 → 1.0», peak)": "what arrives there has no weight from any peak",
    "trees.node_values: (rewards - base).nan_to_num(«0.0 → 1.0»)": "its weight is 0",
    "trees.node_values: torch.where(rewards.isnan(), -torch.inf, «0.0 → 1.0»)": "a factor of all weights cancels out",
    "pooled_ratios.unit_weights: «1 → 2» / size": "a factor of all shares cancels out",
}
"""Name of a mutant → why no test can fail for it."""

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
    """One change: its place, the expression around it before and after, and the source of the changed module."""

    place: str  # module.function
    line: int
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        """`module.function: around «before → after»`; this name does not change when lines move."""
        before, after = (re.findall(r"[\w.]+|[<>=!*/]+|\W", text) for text in (self.before, self.after))
        head = _alike(before, after)
        tail = _alike(before[head:][::-1], after[head:][::-1])
        old, new = ("".join(parts[head : len(parts) - tail]) for parts in (before, after))
        return f"{self.place}: {''.join(before[:head])}«{old} → {new}»{''.join(before[len(before) - tail :])}"


def _alike(first: list[str], second: list[str]) -> int:
    """The number of equal parts at the beginning of two lists."""
    differ = (k for k, (one, other) in enumerate(zip(first, second)) if one != other)
    return next(differ, min(len(first), len(second)))


def mutants_of(path: Path) -> Iterator[Mutant]:
    """All mutants of a file; docstrings, annotations and error messages are not changed."""
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
    """The function of `target` ("" if none), and the smallest node around it whose text occurs once in the function."""
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
    """The text of a node, or the first line of a block; decorators are left out, because they are never changed."""
    return next(line for line in ast.unparse(node).splitlines() if not line.startswith("@"))


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
    """Whether `a | b` is a union of types, as in an alias."""
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
    """Imports one module from a given source."""

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


_ARGUMENTS = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--noconftest", "-W", "ignore"]
"""Tests of core need no fixture of conftest.py, and its imports would cost seconds."""


def _verdict(test: Callable[[], int], seconds: int = SECONDS) -> str:
    """Run `test`, which returns the status of a test run, in a forked process: `killed`, `survived` or `timed out`."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            code = test()
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timed out"
    return "killed" if status else "survived"


def _silence() -> None:
    """Discard all output of this process."""
    void = os.open(os.devnull, os.O_WRONLY)
    os.dup2(void, 1)
    os.dup2(void, 2)


def run(module: str, source: str, tests: list[str]) -> str:
    """The verdict of tests on a module that is imported from a given source."""

    def test() -> int:
        import pytest

        _silence()
        sys.meta_path.insert(0, _Finder(f"flowgrpo.core.{module}", CORE / f"{module}.py", source))
        return int(pytest.main([*_ARGUMENTS, *tests]))

    return _verdict(test)


def screen(module: str, mutants: list[Mutant], tests: list[str]) -> list[str]:
    """The verdicts on mutants whose code is put in place by `_transplant`; the tests are collected only once.

    The list is empty if the tests fail without a mutant. `survived` is only a guess: a change outside of a function
    does not reach the tests, and a change does not reach what the tests computed at collection.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            import pytest

            _silence()
            loop = _Loop(module, mutants)
            pytest.main([*_ARGUMENTS, *tests], plugins=[loop])
            with os.fdopen(writing, "w") as out:
                json.dump(loop.verdicts, out)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as found:
        verdicts: list[str] = json.load(found)
    os.waitpid(child, 0)
    return verdicts


class _Loop:
    """Plugin of pytest that runs the collected tests on one mutant after another."""

    def __init__(self, module: str, mutants: list[Mutant]) -> None:
        self.module, self.mutants = module, mutants
        self.verdicts: list[str] = []

    def pytest_runtestloop(self, session: Any) -> bool:
        """Run the tests on every mutant; replaces pytest's own loop."""
        # The first run is without a mutant. It also loads what is loaded at first use, for all children at once.
        started = time.process_time()
        if self._run(session):
            return True
        limit = math.ceil(2 + 5 * (time.process_time() - started))
        for mutant in self.mutants:
            self.verdicts.append(_verdict(lambda mutant=mutant: self._mutated(session, mutant), limit))
        return True

    def _mutated(self, session: Any, mutant: Mutant) -> int:
        original = sys.modules[f"flowgrpo.core.{self.module}"]
        changed = ModuleType(original.__name__)
        changed.__dict__.update(__file__=original.__file__, __package__=original.__package__)
        exec(compile(mutant.source, str(original.__file__), "exec"), changed.__dict__)
        _transplant(changed.__dict__, original.__dict__, original.__name__)
        return self._run(session)

    def _run(self, session: Any) -> int:
        for item, following in zip(session.items, [*session.items[1:], None]):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        return 0


def _transplant(changed: Any, original: Any, module: str) -> None:
    """Replace the code of a module's functions and methods, so that every module that has imported them sees it."""
    for name, new in changed.items():
        old = original.get(name)
        if isinstance(new, type) and new.__module__ == module:
            _transplant(vars(new), vars(old), module)
        for part in ("fget", "__func__"):
            new, old = getattr(new, part, new), getattr(old, part, old)
        if isinstance(new, FunctionType) and new.__module__ == module:
            old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


def tests_of(module: str) -> list[str]:
    """Test files of a module, relative to the root: first its own file, then the files of core that import it."""
    imported = re.compile(rf"flowgrpo\.core(\.{module}\b| import .*\b{module}\b)")
    files = sorted(
        (ROOT / "tests" / "core").glob("test_*.py"), key=lambda file: (file.stem != f"test_{module}", file.stem)
    )
    found = [str(file.relative_to(ROOT)) for file in files if imported.search(file.read_text(encoding="utf-8"))]
    return [*found, *MORE.get(module, [])]


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="files of flowgrpo/core, without .py; all if none")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args()
    os.chdir(ROOT)
    # These modules are loaded once, and every child inherits them. The package itself is not loaded here.
    import hypothesis
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    # Any counterexample is enough; it need not be the smallest.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutants", phases=phases, database=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
    )
    hypothesis.settings.load_profile("mutants")
    names = given.modules or sorted(path.stem for path in CORE.glob("*.py") if path.stem != "__init__")
    counts: dict[str, dict[str, int]] = {}
    survivors = []
    for name in names:
        path, tests = CORE / f"{name}.py", tests_of(name)
        if not path.is_file() or not tests:
            print(f"{name}: no such module of core, or it has no test file")
            return 2
        started = time.monotonic()
        found = {"killed": 0, "timed out": 0, "survived": 0, "equivalent": 0}
        mutants = list(mutants_of(path))
        unknown = {key for key in EQUIVALENT if key.startswith((f"{name}.", f"{name}:"))} - {m.name for m in mutants}
        if unknown:
            print(f"{name}: EQUIVALENT names mutants that do not exist: {'; '.join(sorted(unknown))}")
            return 2
        verdicts = screen(name, mutants, tests)
        if len(verdicts) < len(mutants):
            print(f"{name}: its tests fail without a mutant: {' '.join(tests)}")
            return 2
        for mutant, verdict in zip(mutants, verdicts):
            if verdict == "survived":
                verdict = "equivalent" if mutant.name in EQUIVALENT else run(name, mutant.source, tests)
            found[verdict] += 1
            if verdict == "survived":
                survivors.append({"place": f"{name}.py:{mutant.line}", "mutant": mutant.name})
                print(f"  survived  {name}.py:{mutant.line}  {mutant.name}", flush=True)
        counts[name] = found
        counted = ", ".join(f"{count} {verdict}" for verdict, count in found.items())
        print(f"{name}: {counted}; {time.monotonic() - started:.0f} s", flush=True)
    if given.out is not None:
        text = json.dumps({"counts": counts, "survivors": survivors}, indent=2, ensure_ascii=False)
        given.out.write_text(text + "\n", encoding="utf-8")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
