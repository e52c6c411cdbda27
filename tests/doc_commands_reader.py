"""Somebody who does what a page of the documentation says, with small material of their own."""

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
from tests.doc_commands_read import Example
from tests.doc_commands_stock import Stock

EMBEDDED = ("scenes", "arithmetic", "arithmetic:untrained")
# What a page writes for something of the reader's, where the option or argument does not tell: what stands for it.
PLACEHOLDERS = {
    "RUN": "runs/mine", "RUN_FOLDER": "runs/mine", "RECIPE": "default", "KEY=VALUE": "run.seed=3", "REWARD": "gold",
    "MODEL": "my/pipeline", "MODEL_FOLDER": "my/pipeline", "FOLDER": "folder", "FILE": "file", "NAME": "default",
    "PROMPT": "a red circle", "NOISE": "7", "KIND": "kernel",
}  # fmt: skip
OF_COMMANDS = {
    ("plan", "NAME"): "flow_grpo",
    ("parts", "KIND"): "kernel",
    ("rewards", "new", "NAME"): "glow",
    ("rewards", "check", "NAME"): "jpeg_compressibility",
    ("rewards", "compare", "NAME"): "gold",
    ("rewards", "compare", "A"): "gold",
    ("rewards", "compare", "B"): "proxy",
}

Rule = Callable[["Reader", list[str], Example], "list[str] | None"]


class NoRule(AssertionError):
    """The documentation has a command that nothing here knows how to try."""


@dataclass(frozen=True)
class Reader:
    """Somebody who does what a page says, in a folder of their own.

    Attributes:
        home: the folder.
        stock: what they have already.
        patch: undone when the page is at its end.
        done: commands that were run, by any reader; an inline one is run once.
        rules: by the name of a command.
        names: of the programs that the page has shown so far.
    """

    home: Path
    stock: Stock
    command: Command
    patch: pytest.MonkeyPatch
    done: set[str]
    rules: Mapping[tuple[str, ...], Rule]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "example"})

    def flowgrpo(self, *words: str, status: int = 0) -> str:
        """Run it as the installed script does; what it was told to write has to be there afterwards."""
        found, output, errors = self.command(*words)
        assert found == status, f"`flowgrpo {' '.join(words)}` ended with {found}\n{output}{errors}"
        for path in _paths(words):
            assert (self.home / path).exists(), f"`flowgrpo {' '.join(words)}` did not write {path}"
        return output

    def run(self, example: Example, words: Sequence[str], start: Callable[..., object] | None = None) -> None:
        """Do a `flowgrpo` command of a page, or of a name that is only mentioned see that it is one.

        `start` is called with the words in place of the command, if something else is to start it.
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
        if example.kind == "span" and text in self.done:
            return
        self.done.add(text)
        rule = self.rules.get(path)
        if rule is None:
            raise NoRule(f"no rule in tests/doc_commands_rules.py for `flowgrpo {' '.join(path)}`")
        filled = [self.fill(path, word) for word in rest if word != "…"]
        small = rule(self, filled, example)
        if small is not None:
            (start or self.flowgrpo)(*path, *small)

    def fill(self, path: Sequence[str], word: str) -> str:
        """A word with what stands for its placeholder."""
        name, at, layer = word.partition("@")
        if name in PLACEHOLDERS:
            return OF_COMMANDS.get((*path, name), PLACEHOLDERS[name]) + at + layer
        if re.fullmatch(r"[A-Z][A-Z_]+", word) and word not in os.environ:
            raise NoRule(f"PLACEHOLDERS in tests/doc_commands_reader.py does not say what stands for {word}")
        return re.sub(r"=N$", "=1", word)

    def put_run(self, word: str, *, text: bool = False) -> None:
        """Make the run that a word names, or that holds what it names, unless there is one."""
        found = re.match(r"runs/[^/]+", word)
        self.stock.put_run(self.home / (found[0] if found else word), text=text)

    def put_model(self, word: str) -> str:
        """A word for the embedded pipeline, at the place of a model folder or hub id, unless that is there."""
        place = Path(word)
        if word in EMBEDDED or (self.home / place).exists():
            return word
        if place.is_absolute():
            return str(embedded_pipeline())
        (self.home / place.parent).mkdir(parents=True, exist_ok=True)
        (self.home / place).symlink_to(embedded_pipeline(), target_is_directory=True)
        return word


def find_command(words: Sequence[str]) -> tuple[tuple[str, ...], Any]:
    """The command of the program that words begin with, and its name.

    Raises:
        NoRule: there is none.
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
    """What is missing of a whole command; "" for one that can be run."""
    try:
        command.make_context("flowgrpo", list(rest))
    except Exception as error:
        # Newer versions of typer bring a click of their own.
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
