"""The images of data that penalty `data` learns beside a rollout: where they are, and which prompt gets which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ...configs.schema import Recipe
from ...core.addressing import address
from ...parts.choice import Choice
from ..data import MissingPrompts, PromptRow, read_prompts, with_given

NAME = "data"
DRAWS = -5
"""In an address, the draw of an image of the data."""


def learned(recipe: Recipe) -> Choice | None:
    """The penalty that learns images of data; None if the recipe has none."""
    return next((one for one in recipe.penalties if one.name == NAME), None)


def read_beside(choice: Choice, fetch: bool = True) -> list[PromptRow]:
    """The prompts of the penalty's source, each with its image.

    Raises:
        NotFetched: the source is a data set of the hub that is not on this machine, and `fetch` is off.
        MissingPrompts: there is no such file.
        ValueError: the file or an image cannot be read, or there is no such column. The message names file and line.
    """
    source, column = choice["source"], choice["column"]
    try:
        rows = read_prompts(source, fetch)
    except MissingPrompts:
        raise MissingPrompts(
            f"no prompt file {source!r} (in {Path.cwd()}), and penalty {choice.short} learns its images; give the path "
            f"of a prompt file with a column of images as penalties.{choice.short}.source"
        ) from None
    mend = f"write the column that holds the image of each prompt as penalties.{choice.short}.column"
    return with_given(rows, source, [column], mend)


def drawn(rows: Sequence[PromptRow], keys: Iterable[int]) -> list[PromptRow]:
    """One of the rows for each prompt of a rollout, by the number that addresses the prompt's randomness."""
    return [rows[address(key, DRAWS) % len(rows)] for key in keys]
