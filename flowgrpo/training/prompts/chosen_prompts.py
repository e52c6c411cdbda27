"""Which prompts of a file an evaluation takes, if it does not take all."""

from __future__ import annotations

from collections.abc import Sequence

from ...configs.sections import HeldOutConfig
from ...core.addressing import address
from .prompt_rows import PromptRow

__all__ = ["evaluated_rows", "places_of"]

_SEED = 20_261_127


def places_of(count: int, most: int | None, take: str) -> list[int]:
    """Rising places of at most `most` of `count` prompts. Equal arguments give equal places.

    Many prompt files are sorted by category or by difficulty, and their first prompts say nothing about the others.
    Prompts at even distances can miss whole categories, if the categories of a file take turns.

    Args:
        count: number of prompts.
        most: number of prompts to take; None takes all.
        take: "spread" cuts the file into stretches of equal length, and takes one prompt of each, at random. "first"
            takes the first prompts.
    """
    if most is None or most >= count:
        return list(range(count))
    if take == "first":
        return list(range(most))
    stretches = [range(k * count // most, (k + 1) * count // most) for k in range(most)]
    return [stretch[address(_SEED, k) % len(stretch)] for k, stretch in enumerate(stretches)]


def evaluated_rows(rows: Sequence[PromptRow], settings: HeldOutConfig) -> list[PromptRow]:
    """The prompts of a file that evaluations take, in the order of the file."""
    return [rows[place] for place in places_of(len(rows), settings.prompts, settings.take)]
