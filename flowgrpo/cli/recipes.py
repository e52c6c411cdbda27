"""`flowgrpo recipes`: which recipes there are, what one of them is, and how two of them differ."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .output import say
from .trusting import TrustOption, trust_run

if TYPE_CHECKING:
    from ..configs.recipe_differences import Difference
    from ..configs.schema import AnyRecipe

TASKS = {"images": "images and videos", "text": "language models", "masked": "masked language models"}
"""The tasks of recipes, and what is written above their list."""
WIDTH = 80
"""Columns of a table of differences."""
_MOST_KEY, _GAP = 36, 2


@dataclass(frozen=True)
class Asked:
    """A recipe that the command line names.

    Attributes:
        source: a name, a file, or the recipe of a run folder.
        overrides: the `key=value` words behind it.
    """

    source: str
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.source, *self.overrides])


def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="One recipe or two, as `plan` takes them, or run folders; key=value changes the recipe before it.",
            metavar="[RECIPE [KEY=VALUE]...]...",
        ),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """List the recipes and parts that come with the package; say what a recipe is, or how two recipes differ."""
    asked = _asked(words or [])
    if not asked:
        return _list()
    trust_run(trust, [], {one.source: False for one in asked})
    from ..configs.load import load_recipe

    loaded = [(one, load_recipe(one.source, one.overrides, rewards=False)) for one in asked]
    if len(loaded) == 1:
        return _tell(*loaded[0])
    _compare(*loaded)


def _asked(words: Sequence[str]) -> list[Asked]:
    """The recipes that the words name, each with its overrides.

    Raises:
        ValueError: an override comes before every recipe, or there are more than two recipes.
    """
    found: list[Asked] = []
    for word in words:
        if "=" not in word:
            found.append(Asked(_source(word), ()))
        elif not found:
            raise ValueError(
                f"{word} stands before a recipe, and it changes the recipe before it; write the recipe first, as in "
                f"`flowgrpo recipes default {word}`"
            )
        else:
            found[-1] = Asked(found[-1].source, (*found[-1].overrides, word))
    if len(found) > 2:
        raise ValueError(
            f"{len(found)} recipes are named ({', '.join(one.source for one in found)}), and two are compared; name "
            "one or two"
        )
    return found


def _source(word: str) -> str:
    config = Path(word) / "config.yaml"
    return str(config) if config.is_file() else word


def _list() -> None:
    from ..configs.layers import KINDS, parts, recipe_names

    for task, said in TASKS.items():
        say(f"{said}:")
        for name, line in recipe_names(task).items():
            say(f"  {name:<21} {line}")
        say("")
    say("parts that can be added to a recipe, at most one of each kind, as in flow_grpo+sd35_medium+ocr+gpus8:")
    for kind in KINDS:
        for part in parts().values():
            if part.kind == kind:
                say(f"  {part.name:<21} {kind:<9} {part.line}")


def _tell(asked: Asked, recipe: AnyRecipe) -> None:
    from ..configs.layers import bases, has_published
    from ..configs.recipe_differences import defaults_of, differences

    _head(asked)
    for line in _filled(f"paper: {recipe.paper or 'none named'}"):
        say(line)
    say(f"task: {recipe.task} ({TASKS[recipe.task]})")
    if below := bases(asked.source):
        for line in _filled(f"based on: {', which is based on '.join(below)}"):
            say(line)
    if has_published(asked.source):
        say(f"published settings: {asked.source}@published")
    found = differences(defaults_of(recipe), recipe)
    say("\nkeys that differ from the defaults:")
    for line in table(found, ("default", "here")):
        say(line)
    say(f"\nlook at it: flowgrpo plan {asked}\ntry it: flowgrpo train {asked}")


def _compare(first: tuple[Asked, AnyRecipe], second: tuple[Asked, AnyRecipe]) -> None:
    from ..configs.recipe_differences import differences, only_of

    (one, left), (other, right) = first, second
    for asked, _ in (first, second) if str(one) != str(other) else (first,):
        _head(asked)
    found = differences(left, right)
    if left.task != right.task:
        tasks = " and ".join(f"{task} ({TASKS[task]})" for task in (left.task, right.task))
        for line in _filled(f"these are of different tasks, {tasks}; what both have is compared"):
            say(line)
        for asked, mine, others in ((one, left, right), (other, right, left)):
            for line in _filled(f"only {asked} has: {', '.join(only_of(mine, others))}"):
                say(line)
    if not found:
        labels = left.task != right.task or (left.name, left.paper) != (right.name, right.paper)
        return say("they are equal" + ", but for their name or paper" * labels)
    say("")
    for line in table(found, (str(one), str(other))):
        say(line)
    if kinds := _kinds(left, right):
        say("")
        for line in _filled(f"`flowgrpo parts KIND` says what the parts are, with KIND one of: {', '.join(kinds)}"):
            say(line)


def _kinds(first: AnyRecipe, second: AnyRecipe) -> list[str]:
    """The kinds of the parts that only one of two recipes has chosen, as `flowgrpo parts` takes them."""
    from ..parts.choice import choices

    chosen = [{(choice.kind, choice.name) for _, choice in choices(recipe)} for recipe in (first, second)]
    return sorted({kind.replace(" ", "_") for kind, _ in chosen[0] ^ chosen[1]})


def _head(asked: Asked) -> None:
    """Print a recipe as it was asked for, and what a recipe of the package is."""
    from ..configs.layers import recipe_lines

    name, at, _ = asked.source.partition("@")
    line = recipe_lines().get(name, "")
    for part in _filled(
        ": ".join(filter(None, [str(asked), line])) + ", with its published settings" * bool(line and at)
    ):
        say(part)


def table(found: Sequence[Difference], names: tuple[str, str]) -> Iterator[str]:
    """Differences as lines of at most `WIDTH` characters: key and two values, and below them what the key does.

    Args:
        found: the differences.
        names: what stands above the values.
    """
    if not found:
        return
    key = min(max(len("key"), *(len(one.key) for one in found)), _MOST_KEY)
    values = [[names[0], *(line for one in found for line in one.first)]]
    values += [[names[1], *(line for one in found for line in one.second)]]
    longest = [max(map(len, lines)) for lines in values]
    room = WIDTH - key - 2 * _GAP
    # A column that needs less than its half leaves the rest to the other.
    first = min(longest[0], max(room // 2, room - longest[1]))
    widths = key, first, room - first
    yield from _row(("key",), (names[0],), (names[1],), widths)
    for one in found:
        yield from _row((one.key,), one.first, one.second, widths)
        if one.says:
            yield "    " + textwrap.shorten(one.says, WIDTH - 4, placeholder=" …")


def _row(
    key: Sequence[str], first: Sequence[str], second: Sequence[str], widths: tuple[int, int, int]
) -> Iterator[str]:
    cells = [
        [part for line in cell for part in _wrapped(line, width)] for cell, width in zip((key, first, second), widths)
    ]
    for parts in zip_longest(*cells, fillvalue=""):
        yield (" " * _GAP).join(f"{part:<{width}}" for part, width in zip(parts, widths)).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False) or [""]


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
