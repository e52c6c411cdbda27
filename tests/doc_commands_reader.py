"""A reader who does what a page of the documentation says, with small models and data."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer

from flowgrpo.cli import app as cli
from flowgrpo.training.model_paths import embedded_pipeline
from tests.conftest import Command
from tests.doc_commands_read import PAGES, Example, examples
from tests.doc_commands_stock import Stock

EMBEDDED = ("scenes", "arithmetic", "arithmetic:untrained")
# Placeholders that a page writes for something of the reader's, and the words that replace them here.
PLACEHOLDERS = {
    "RUN": "runs/mine", "RUN_FOLDER": "runs/mine", "RECIPE": "default", "KEY=VALUE": "run.seed=3", "REWARD": "gold",
    "MODEL": "my/pipeline", "MODEL_FOLDER": "my/pipeline", "FOLDER": "folder", "FILE": "file", "NAME": "default",
    "PROMPT": "a red circle", "NOISE": "7", "KIND": "kernel",
}  # fmt: skip
# Placeholders that have another meaning after some commands.
OF_COMMANDS = {
    ("plan", "NAME"): "flow_grpo",
    ("parts", "KIND"): "kernel",
    ("rewards", "new", "NAME"): "glow",
    ("rewards", "show", "NAME"): "gold",
    ("rewards", "check", "NAME"): "jpeg_compressibility",
    ("rewards", "compare", "NAME"): "gold",
    ("rewards", "compare", "A"): "gold",
    ("rewards", "compare", "B"): "proxy",
}

Rule = Callable[["Reader", list[str], Example], "list[str] | None"]


class NoRule(AssertionError):
    """The documentation has an example for which there is no rule."""


@dataclass(frozen=True)
class Reader:
    """A reader who does what a page says, in an empty folder.

    Attributes:
        home: the folder.
        stock: models, runs and data that the reader has already.
        command: runs `flowgrpo`.
        patch: changes that are undone at the end of the page.
        done: what any reader has run; an inline command is run only once.
        rules: the rules, by the name of the command.
        names: variables of the programs that the page has shown so far.
    """

    home: Path
    stock: Stock
    command: Command
    patch: pytest.MonkeyPatch
    done: set[str]
    rules: Mapping[tuple[str, ...], Rule]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "example"})

    def flowgrpo(self, *words: str, status: int = 0) -> str:
        """Run `flowgrpo` like the installed script; every file or folder that the words name must exist afterwards."""
        found, output, errors = self.command(*words)
        assert found == status, f"`flowgrpo {' '.join(words)}` ended with {found}\n{output}{errors}"
        for path in _paths(words):
            assert (self.home / path).exists(), f"`flowgrpo {' '.join(words)}` did not write {path}"
        return output

    def run(self, example: Example, words: Sequence[str], start: Callable[..., object] | None = None) -> None:
        """Run a `flowgrpo` command of a page; for a command that is only mentioned, check that it exists.

        `start` is called with the words in place of `flowgrpo`, if another program has to start the command.
        """
        if list(words) == ["--version"]:
            assert self.command(*words)[0] == 0
            return
        path, command = find_command(words)
        rest = list(words[len(path) :])
        usage = any(re.fullmatch(r"\[.*\](\.\.\.)?|.+\.\.\.", word) for word in rest)
        _check_options(command, path, rest)
        if usage or (example.kind == "span" and (not rest or _fault(command, rest))):
            return
        if "--help" in rest:
            assert self.command(*words)[0] == 0
            return
        text = " ".join(words)
        if example.kind == "span" and (text in self.done or _is_shown_with_more(example)):
            return
        self.done.add(text)
        rule = self.rules.get(path)
        if rule is None:
            raise NoRule(f"no rule in tests/doc_commands_rules.py for `flowgrpo {' '.join(path)}`")
        filled = [self.fill(path, word) for word in rest if word != "…"]
        small = rule(self, filled, example)
        if small is not None:
            (start or self.flowgrpo)(*path, *small)

    def first(self, *name: str) -> bool:
        """Whether no reader has run what has this name. Call it before the run."""
        known = f"runs {' '.join(name)}"
        found = known not in self.done
        self.done.add(known)
        return found

    def fill(self, path: Sequence[str], word: str) -> str:
        """The word with its placeholder replaced."""
        name, at, layer = word.partition("@")
        if name in PLACEHOLDERS:
            return OF_COMMANDS.get((*path, name), PLACEHOLDERS[name]) + at + layer
        if re.fullmatch(r"[A-Z][A-Z_]+", word) and word not in os.environ:
            raise NoRule(f"PLACEHOLDERS in tests/doc_commands_reader.py does not say what replaces {word}")
        return re.sub(r"=N$", "=1", word)

    def put_run(self, word: str, *, text: bool = False) -> None:
        """Make the run that a word names, or the run of a file that the word names, unless there is one."""
        found = re.match(r"runs/[^/]+", word)
        self.stock.put_run(self.home / (found[0] if found else word), text=text)

    def put_model(self, word: str) -> str:
        """A word that names a model: if the folder or hub id does not exist here, it leads to the embedded pipeline."""
        place = Path(word)
        if word in EMBEDDED or (self.home / place).exists():
            return word
        if place.is_absolute():
            return str(embedded_pipeline())
        (self.home / place.parent).mkdir(parents=True, exist_ok=True)
        (self.home / place).symlink_to(embedded_pipeline(), target_is_directory=True)
        return word


def _is_shown_with_more(span: Example) -> bool:
    """Whether a block of commands on some page has the words of an inline command, and perhaps more words."""
    return any(
        other.kind == "command" and other.words[: len(span.words)] == span.words
        for page in PAGES
        for other in examples(page)
    )


def find_command(words: Sequence[str]) -> tuple[tuple[str, ...], Any]:
    """The name of the command that the words begin with, and the command itself.

    Raises:
        NoRule: there is no such command.
    """
    command: Any = typer.main.get_command(cli.app)
    path: tuple[str, ...] = ()
    while hasattr(command, "commands") and len(path) < len(words) and not words[len(path)].startswith("-"):
        if words[len(path)] not in command.commands:
            raise NoRule(f"there is no command `flowgrpo {' '.join(words[: len(path) + 1])}`")
        path = (*path, words[len(path)])
        command = command.commands[path[-1]]
    return path, command


def _check_options(command: Any, path: Sequence[str], rest: Sequence[str]) -> None:
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    for word in rest:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"`flowgrpo {' '.join(path)}` has no option {word}"


def _fault(command: Any, rest: Sequence[str]) -> str:
    """What a command lacks to be complete; "" for a command that can be run."""
    try:
        command.make_context("flowgrpo", list(rest))
    except Exception as error:
        # Newer versions of typer contain their own copy of click.
        if "UsageError" not in {kind.__name__ for kind in type(error).__mro__}:
            raise
        return str(error)
    return ""


def given(path: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """Values of the arguments and options of a command, by name."""
    return dict(find_command(path)[1].make_context("flowgrpo", list(words)).params)


def _paths(words: Sequence[str]) -> list[str]:
    """Files and folders that the words of a command name."""
    path = find_command(words)[0]
    values = given(path, words[len(path) :]).values()
    each = [part for value in values for part in (value if isinstance(value, list) else [value])]
    return [str(part) for part in each if isinstance(part, Path) and str(part) in words]
