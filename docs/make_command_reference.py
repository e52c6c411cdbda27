"""Writes docs/commands.md from the command line itself, so that the page cannot differ from the code.

Run it from anywhere: `python docs/make_command_reference.py`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo

from flowgrpo.cli.app import app

PAGE = Path(__file__).resolve().with_name("commands.md")

INTRODUCTION = """\
# Commands

<!-- Written by docs/make_command_reference.py from flowgrpo/cli/app.py and its parts. Change those, not this page. -->

There is one command, `flowgrpo`; `python -m flowgrpo` does the same. `--help` after any of the names below prints the
text of this page. A word in brackets may be left out, and a word with three dots may be given several times. Options
may come before or after the other words.

An error that you can mend is printed as one message, and the exit status is 1. The exit status is 2 for a wrong option,
and 130 after Ctrl-C.
"""

KINDS = {str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH"}


@dataclass(frozen=True)
class Parameter:
    """An argument or option of a command.

    Attributes:
        words: the words on the command line.
        positional: whether the parameter is written without dashes.
        required: whether the parameter must be given.
        default: the default; empty if there is none.
        meaning: the help text.
    """

    words: str
    positional: bool
    required: bool
    default: str
    meaning: str


def commands(part: typer.Typer = app, prefix: str = "flowgrpo") -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command with its full name, in the order of `--help`; a group that is itself a command comes first."""
    if part.registered_callback is not None and part.registered_callback.callback is not None:
        yield prefix, part.registered_callback.callback
    for command in part.registered_commands:
        assert command.callback is not None
        yield f"{prefix} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for group in part.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance, f"{prefix} {group.name}")


def parameters(command: Callable[..., Any]) -> Iterator[Parameter]:
    """Arguments and options of a command, in the order of its signature.

    Raises:
        ValueError: an argument or option has no help.
    """
    # `get_type_hints` of Python 3.10 puts an `Optional` around the `Annotated` of a parameter whose default is None.
    for name, given in inspect.signature(command, eval_str=True).parameters.items():
        hint = given.annotation
        if hint is typer.Context:
            continue
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        info = next((note for note in notes if isinstance(note, ArgumentInfo | OptionInfo)), None)
        if info is None or not info.help:
            raise ValueError(f"{command.__name__}: {name} has no help; write Annotated[…, typer.Option(help=…)]")
        yield _parameter(name, kind, given.default, info)


def _parameter(name: str, kind: Any, value: Any, info: ArgumentInfo | OptionInfo) -> Parameter:
    kinds = [part for part in get_args(kind) if part is not type(None)] if _is_union(kind) else [kind]
    many = get_origin(kinds[0]) is list
    base = get_args(kinds[0])[0] if many else kinds[0]
    positional, required = isinstance(info, ArgumentInfo), value is inspect.Parameter.empty
    if positional:
        words = info.metavar or (name.upper() if required else f"[{name.upper()}]") + "..." * many
    else:
        words = _flag(name, info) + (f" {KINDS[base]}" if base is not bool else "")
    default = "" if required or value is None or value is False else f"`{value}`"
    return Parameter(words, positional, required, default, f"{info.help}{_bounds(info)}")


def _is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or get_origin(kind) is Union


def _flag(name: str, info: ArgumentInfo | OptionInfo) -> str:
    # In Annotated, the first of the given names is in the place of a default.
    given = [word for word in (info.default, *(info.param_decls or ())) if str(word).startswith("--")]
    return str(given[0]) if given else f"--{name.replace('_', '-')}"


def _bounds(info: ArgumentInfo | OptionInfo) -> str:
    if info.min is not None and info.max is not None:
        # A bound that no person reaches, such as 2⁶², says nothing.
        return f" From {info.min:g} to {info.max:g}." if info.max < 2**53 else f" At least {info.min:g}."
    return f" At least {info.min:g}." if info.min is not None else ""


def _section(name: str, command: Callable[..., Any]) -> str:
    found = list(parameters(command))
    usage = [name, *(p.words for p in found if p.positional or p.required)]
    usage += ["[OPTIONS]"] if any(not p.positional and not p.required for p in found) else []
    lines = [f"## {name}", "", inspect.cleandoc(command.__doc__ or ""), "", "```usage", " ".join(usage), "```"]
    if found:
        lines += ["", "| | default | meaning |", "| --- | --- | --- |"]
        lines += [
            f"| `{_cell(p.words)}` | {_cell(p.default) or ('required' if p.required else '')} | {_cell(p.meaning)} |"
            for p in found
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    """The whole page.

    Raises:
        ValueError: a command has no docstring, or one of its parameters has no help.
    """
    every = list(commands())
    silent = [name for name, command in every if not command.__doc__]
    if silent:
        raise ValueError(f"{silent[0]} has no docstring, which is its help; write one")
    rows = "\n".join(
        f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell((command.__doc__ or '').strip().splitlines()[0])} |"
        for name, command in every
    )
    overview = f"| command | what it does |\n| --- | --- |\n{rows}\n"
    return "\n".join([INTRODUCTION, overview, *(_section(name, command) for name, command in every)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
