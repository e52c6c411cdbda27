"""The tables of docs/methods.md: published methods, whether they are here, and how each is chosen.

Rows are in methods.yaml. The claims of a row are checked against the code as far as possible: lines of a recipe are
read as in a run, names are imported, rewards are made, and the package must cite the numbers of papers.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import yaml

import flowgrpo
from flowgrpo.configs.load import load_recipe, recipe_names
from flowgrpo.configs.schema import AnyRecipe, Recipe
from flowgrpo.parts.kinds import KINDS
from flowgrpo.rewards.registry import BUILTIN, outline
from flowgrpo.rewards.runner import RewardSet
from flowgrpo.training.credit.from_scores import Credit
from flowgrpo.training.planning import forecast
from flowgrpo.training.session import reward_specs
from flowgrpo.training.text.answer_objective import tried

ROWS = Path(__file__).resolve().with_name("methods.yaml")
PACKAGE = Path(flowgrpo.__file__).parent
BASES = {"images": "mixgrpo_flash_guard", "text": "text"}
AIM = 60
"""The lines of code that a method should not exceed for itself."""
OUTLINED = ("choices", "reactions", "rendered")
"""Rewards that learn from files of a person's own, or load a pipeline, when they are made. Only their names and options
are checked."""
NEEDS = {
    "recipe": ("lines or recipes", ("library", "reward")),
    "library": ("library", ("lines", "recipes", "reward")),
    "reward": ("reward", ("library", "recipes")),
    "not yet": ("note", ("lines", "recipes", "library", "reward")),
}
"""State → the fields that a row must have, and the fields that it must not have."""

Way = Mapping[str, Any]
"""Lines of a recipe that belong together: dotted key -> value."""

LEGEND = """\
The state of a row says how to use the method:

- **recipe**: a recipe of the package or lines of a recipe choose the method. `a.b: c` is the key `b` in the section
  `a` of a file. On the command line it is `a.b=c`, as in `flowgrpo train text advantage=beta`. Lines after "Images:"
  serve images only, lines after "Text:" serve text only, and other lines serve both. A test checks all lines on the
  recipes `mixgrpo_flash_guard` (images) and `text`. If a line chooses another part, the options of the previous part
  are dropped.
- **reward**: a reward of that name is the method. The row gives the lines that put it in a recipe.
- **library**: a function of `flowgrpo` is the method, for code of your own. No recipe reaches it.
- **not yet**: the method is not here. The row says what is missing.

The number beside a title is the arXiv number of the paper, as the code cites it. If a method is only partly here, the
end of its row says what is missing.
"""


@dataclass(frozen=True)
class Row:
    """One method.

    Attributes:
        paper: title or short name of the paper.
        state: one of `NEEDS`.
        priority: 1 or 2; None in a table that is not counted.
        arxiv: number of the paper.
        both: ways that serve images and text.
        images: ways for images only.
        text: ways for text only.
        recipes: names of recipes of the package.
        library: names below `flowgrpo`.
        reward: name of a reward.
        code: names below `flowgrpo` of the functions and classes that no other method needs. What only these need is
            counted with them, and need not be named.
        note: further remarks.
    """

    paper: str
    state: str
    priority: int | None = None
    arxiv: str = ""
    both: Sequence[Way] = ()
    images: Sequence[Way] = ()
    text: Sequence[Way] = ()
    recipes: Sequence[str] = ()
    library: Sequence[str] = ()
    reward: str = ""
    code: Sequence[str] = ()
    note: str = ""

    @property
    def lines(self) -> list[tuple[str, Way]]:
        """Pairs of a task and a way to choose the method in it."""
        shared = [(task, way) for task in BASES for way in self.both]
        return [*shared, *(("images", way) for way in self.images), *(("text", way) for way in self.text)]


@dataclass(frozen=True)
class Part:
    """Rows of one table; `later` are titles that are listed without a priority."""

    title: str
    rows: tuple[Row, ...]
    intro: str = ""
    later: str = ""
    counted: bool = True


def read_rows(path: Path = ROWS) -> list[Part]:
    """The parts of the page.

    Raises:
        ValueError: a row has an unknown key.
    """
    known = {entry.name for entry in fields(Row)}
    parts = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        for row in entry["rows"]:
            if unknown := sorted(set(row) - known):
                raise ValueError(f"{row.get('paper')}: unknown key {unknown[0]}; use {', '.join(sorted(known))}")
        parts.append(Part(**{**entry, "rows": tuple(Row(**row) for row in entry["rows"])}))
    return parts


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump([value], default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True)
    return text.strip()[1:-1]


# -- what is claimed ---------------------------------------------------------------------------------------------


def faults(parts: Sequence[Part]) -> list[str]:
    """The claims of the rows that do not hold, in words; empty if all hold."""
    rows = [row for part in parts for row in part.rows]
    found = [f"{paper} is listed {count} times" for paper, count in Counter(r.paper for r in rows).items() if count > 1]
    for part in parts:
        for row in part.rows:
            found += [f"{row.paper}: {fault}" for fault in _row_faults(row)]
            if part.counted != (row.priority in (1, 2)):
                found.append(f"{row.paper}: priority is {row.priority}; rows that are counted have 1 or 2, others none")
    return found


def _row_faults(row: Row) -> Iterator[str]:
    if row.state not in NEEDS:
        yield f"state is {row.state!r}; use one of {', '.join(NEEDS)}"
        return
    needed, refused = NEEDS[row.state]
    if not any(getattr(row, name) for name in needed.split(" or ")):
        yield f"state {row.state} needs {needed}"
    yield from (f"state {row.state} does not go with {name}" for name in refused if getattr(row, name))
    if row.arxiv and row.arxiv not in cited():
        yield f"nothing in the package cites {row.arxiv}"
    yield from (f"there is no recipe {name!r}" for name in row.recipes if name not in recipe_names())
    for name in row.code:
        if tuple(name.rpartition(".")[::2]) not in definitions():
            yield f"there is no function or class {name}"
    for name in row.library:
        yield from _library_faults(name, row.arxiv)
    for task, way in row.lines:
        yield from _way_faults(task, way)
        if row.reward and row.reward not in _words(way):
            yield f"{flow(dict(way))} does not name the reward {row.reward}"
    if row.reward and (row.reward not in BUILTIN or not row.lines):
        yield f"{row.reward!r} is no built-in reward, or there are no lines for it"


@dataclass(frozen=True)
class Definition:
    """A function or class at the top level of a module of the package.

    Attributes:
        source: its text.
        names: what its text refers to, as (module, name).
    """

    source: str
    names: frozenset[tuple[str, str]]


@cache
def modules() -> Mapping[Path, tuple[str, ast.Module]]:
    """The text and the tree of every module of the package."""
    texts = {file: file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    return {file: (text, ast.parse(text)) for file, text in texts.items()}


def imports(nodes: Iterable[ast.AST]) -> Iterator[ast.ImportFrom]:
    """The statements `from … import …` among some statements and within them; expressions are not searched."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield node
        for within in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from imports(getattr(node, within, ()))


@cache
def definitions() -> Mapping[tuple[str, str], Definition]:
    """All functions and classes of the package by (module, name); the rest of a module has the name ""."""
    found = {}
    for file, (text, tree) in modules().items():
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        package = ".".join(["flowgrpo", *parts[:-1]])
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        top = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        known = {node.name: (module, node.name) for node in top}
        for node in imports(tree.body):
            source = resolve_name("." * node.level + (node.module or ""), package).removeprefix("flowgrpo.")
            known |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
        rest = [node for node in tree.body if node not in top and not isinstance(node, ast.Import | ast.ImportFrom)]
        for name, nodes in [*((node.name, [node]) for node in top), ("", rest)]:
            words = {word.id for node in nodes for word in ast.walk(node) if isinstance(word, ast.Name)}
            source = _source(text, nodes[0]) if name else ""
            refers = frozenset(known[word] for word in words & set(known)) - {(module, name)}
            found[module, name] = Definition(source, refers)
    return found


def _source(text: str, node: ast.AST) -> str:
    """The text of a function or class with its decorators."""
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return "\n".join(text.splitlines()[_first_line(node) - 1 : node.end_lineno])


def _first_line(node: ast.stmt) -> int:
    """The line of the first decorator of a statement, or of the statement itself."""
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])


@cache
def users() -> Mapping[tuple[str, str], frozenset[tuple[str, str]]]:
    """What refers to each function or class of the package."""
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for place, one in definitions().items():
        for name in one.names & set(definitions()):
            found.setdefault(name, set()).add(place)
    return {name: frozenset(places) for name, places in found.items()}


def own_lines(names: Sequence[str]) -> int:
    """Lines with statements of functions and classes below `flowgrpo`, and of what only these need."""
    mine = {(module, name) for module, _, name in (full.rpartition(".") for full in names)}
    grown = True
    while grown:
        needed = {name for place in mine for name in definitions()[place].names if name in definitions()}
        more = {name for name in needed - mine if users()[name] <= mine}
        mine, grown = mine | more, bool(more)
    return sum(code_lines(definitions()[place].source) for place in mine)


def code_lines(source: str) -> int:
    """Number of lines of Python code that have a statement; docstrings do not count."""
    tree = ast.parse(textwrap.dedent(source))
    counted: set[int] = set()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    strings = {
        id(node.body[0])
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and id(node) not in strings:
            last = node.body[0].lineno - 1 if isinstance(node, documented) else node.end_lineno or node.lineno
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            last = min([last, *(child.lineno - 1 for child in inner)]) if inner else last
            counted.update(range(_first_line(node), last + 1))
    lines = textwrap.dedent(source).splitlines()
    return sum(1 for k in counted if lines[k - 1].strip() and not lines[k - 1].strip().startswith("#"))


def _library_faults(name: str, arxiv: str) -> Iterator[str]:
    module_name, _, attribute = f"flowgrpo.{name}".rpartition(".")
    try:
        module = importlib.import_module(module_name)
        target = getattr(module, attribute)
    except (ImportError, AttributeError):
        yield f"there is no {name} to import"
        return
    if arxiv and arxiv not in inspect.getsource(module):
        yield f"{module_name} does not cite {arxiv}"
    if any(target is other for other in reached()):
        yield f"{name} is used outside of core, so a recipe may reach it; give its lines"


def _way_faults(task: str, way: Way) -> Iterator[str]:
    """The faults for which a run would refuse the lines before it loads a model."""
    try:
        _check(load_recipe(BASES[task], [f"{key}={flow(value)}" for key, value in way.items()]))
    except ValueError as error:
        yield f"{task}: {flow(dict(way))}: {error}"


def _check(recipe: AnyRecipe) -> None:
    if isinstance(recipe, Recipe):
        forecast(recipe, most=1)
    else:
        tried(recipe)
    Credit(recipe)
    specs = reward_specs(recipe.rewards)
    rewards = RewardSet([outline(spec) if spec.name in OUTLINED else spec for spec in specs])
    for reward in rewards.rewards:
        # The prompt file decides which columns exist. It does not decide whether images or completions are scored.
        reward.check(
            "images" if isinstance(recipe, Recipe) else "completions",
            set(reward.needed) - {"images", "completions"}, grouped=True,
        )  # fmt: skip
    rewards.close()


def _words(value: Any) -> set[str]:
    """All texts in a nested value."""
    if isinstance(value, str):
        return {value}
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return {word for one in inner for word in _words(one)}


@cache
def cited() -> frozenset[str]:
    """Numbers of papers in the sources and recipes of the package."""
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE / "configs" / "recipes").glob("*.yaml")]
    found = (re.findall(r"\b\d{4}\.\d{5}\b", file.read_text(encoding="utf-8")) for file in files)
    return frozenset(number for numbers in found for number in numbers)


@cache
def reached() -> tuple[Any, ...]:
    """The parts of `core` that other packages import, or that recipes choose by name."""
    found = [part for kind in KINDS.values() for part in kind.builtin.values()]
    found = [one.func if isinstance(one, partial) else one for one in found]
    for file, (_, tree) in modules().items():
        package = ".".join(["flowgrpo", *file.relative_to(PACKAGE).parts[:-1]])
        if package == "flowgrpo.core":
            continue
        for node in imports(tree.body):
            source = resolve_name("." * node.level + (node.module or ""), package)
            if source == "flowgrpo.core" or source.startswith("flowgrpo.core."):
                module = importlib.import_module(source)
                found += [getattr(module, alias.name) for alias in node.names if hasattr(module, alias.name)]
    return tuple(found)


# -- how it is written -------------------------------------------------------------------------------------------


def counts(parts: Sequence[Part]) -> str:
    """The number of methods that are here, as a sentence and a table by priority and state."""
    rows = [row for part in parts if part.counted for row in part.rows]
    here = sum(row.state != "not yet" for row in rows)
    table = [f"| priority | rows | here | {' | '.join(NEEDS)} |", "| --- " * (3 + len(NEEDS)) + "|"]
    for name, mine in (
        ("1", [row for row in rows if row.priority == 1]),
        ("2", [row for row in rows if row.priority == 2]),
        ("both", rows),
    ):
        states = Counter(row.state for row in mine)
        numbers = [len(mine), len(mine) - states["not yet"], *(states[state] for state in NEEDS)]
        table.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    return f"Of {len(rows)} published methods with a priority, {here} are here:\n\n" + "\n".join(table) + "\n"


def how(row: Row) -> str:
    """How a method is chosen: a cell of the table."""
    sentences = [_recipes(row.recipes)] if row.recipes else []
    for word, ways in (("", row.both), ("Images: ", row.images), ("Text: ", row.text)):
        if ways:
            written = [", ".join(f"`{key}: {flow(value)}`" for key, value in way.items()) for way in ways]
            sentences.append(f"{word}{'; or '.join(written)}.")
    if row.library:
        sentences.append(", ".join(f"`{name}`" for name in row.library) + ".")
    return " ".join([*sentences, row.note]).strip().replace("|", r"\|")


def _recipes(names: Sequence[str]) -> str:
    return ", ".join(f"`flowgrpo train {name}`" for name in names) + "."


def prices(parts: Sequence[Part]) -> str:
    """A table of the lines of code that each method needs for itself, with the median and the largest number."""
    rows = [row for part in parts for row in part.rows if row.code]
    if not rows:
        return ""
    sums = [own_lines(row.code) for row in rows]
    table = ["## What a method costs", "", wrapped(PRICES), "", "| paper | own code | lines |", "| --- | --- | --- |"]
    for row, total in zip(rows, sums):
        table.append(f"| {row.paper} | {', '.join(f'`{name}`' for name in row.code)} | {total} |")
    within = sum(total <= AIM for total in sums)
    table += [
        "",
        f"Median {statistics.median(sums):g} lines, largest {max(sums)}; {within} of {len(sums)} have at most {AIM}.",
    ]
    return "\n".join(table) + "\n"


def part_text(part: Part) -> str:
    """A part of the page: heading, table, and titles without a priority."""
    lines = [f"## {part.title}", ""]
    lines += [wrapped(part.intro), ""] if part.intro else []
    columns = ["paper", *(["priority"] if part.counted else []), "state", "how to choose it"]
    lines += [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in part.rows:
        paper = f"{row.paper} ([{row.arxiv}](https://arxiv.org/abs/{row.arxiv}))" if row.arxiv else row.paper
        state = f"reward `{row.reward}`" if row.reward else row.state
        cells = [paper, *([str(row.priority)] if part.counted else []), state, how(row)]
        lines.append(f"| {' | '.join(cells)} |")
    if part.later:
        lines += ["", wrapped(f"These methods have no priority and are not here: {part.later}.")]
    return "\n".join(lines) + "\n"


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


PRICES = """\
Own code is code that only this method needs: the parts that are named, and what nothing else refers to. Only lines with
statements are counted, not blank lines, comments or docstrings. The lines of signatures and
decorators count too. Methods that are not listed are choices among shared parts."""


def tables() -> str:
    """Counts, legend and all parts.

    Raises:
        ValueError: a claim does not hold.
    """
    parts = read_rows()
    if wrong := faults(parts):
        raise ValueError("docs/methods.yaml:\n" + "\n".join(wrong))
    return "\n".join(text for text in [counts(parts), LEGEND, *map(part_text, parts), prices(parts)] if text)


if __name__ == "__main__":
    print(tables())
