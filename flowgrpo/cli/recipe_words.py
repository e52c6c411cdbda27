"""The words of a command that name a recipe and change its keys, and a hint where they are written as options."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

import typer
import typer.core

RecipeArgument = Annotated[
    list[str] | None,
    typer.Argument(help="A recipe (name or YAML file), then key=value overrides.", metavar="[RECIPE] [KEY=VALUE]..."),
]


def split(words: list[str] | None) -> tuple[str | None, list[str]]:
    """The recipe, if the first word is one, and the overrides."""
    given = list(words or [])
    if given and "=" not in given[0]:
        return given[0], given[1:]
    return None, given


class HintedCommand(typer.core.TyperCommand):
    """A command whose error about an unknown option says what to write in its place, if that is known."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the command line; an unknown option is told how it is written here."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # The exception comes from typer's own copy of click, or from click, as the version has it.
            option = getattr(error, "option_name", None)
            if isinstance(option, str) and option.startswith("--") and (told := self.hint(option, given)):
                # Some versions of click end the message with a full stop.
                error.message = f"{error.message.rstrip('.')}. {told}"  # type: ignore[attr-defined]
                error.possibilities = []  # type: ignore[attr-defined]
            raise

    def hint(self, option: str, args: list[str]) -> str:
        """A sentence about an unknown option; empty if nothing is known about it."""
        return ""


class RecipeCommand(HintedCommand):
    """A command with a recipe. If `--seed 3` stands for a key of the recipe, the error shows the key: `run.seed=3`."""

    def hint(self, option: str, args: list[str]) -> str:
        """The key of a recipe that an option stands for."""
        from ..configs.key_hints import option_hint

        return option_hint(option, value_of(option, args))


def value_of(option: str, args: list[str]) -> str:
    """What follows an option on the command line; VALUE if nothing does."""
    joined = [word.partition("=")[2] for word in args if word.startswith(f"{option}=")]
    after = [value for word, value in pairwise(args) if word == option and not value.startswith("-")]
    return [*joined, *after, "VALUE"][0]
