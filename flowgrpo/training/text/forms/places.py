"""Where a completion is cut: after a number of unlikely tokens, at the parts of the recipe, or where words stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from ....parts.choice import Choice
from ....parts.needs import idle

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ..writing import Attempt, Writer

At = Literal["tokens", "parts"]
"""A text that a form adds to completions."""
CLOSING = "\n</think>\n\n"
"""What ends the thoughts of a reasoning model."""


def cuts_of(writer: Writer, attempts: Sequence[Attempt], at: At, every: int, below: float) -> list[list[int]]:
    """The numbers of tokens at which each attempt is cut, rising; an attempt may have none.

    Args:
        writer: its policy cuts completions into parts.
        attempts: written.
        at: with `parts`, the first token of each part but the first. With `tokens`, see the following.
        every: unlikely tokens of a segment.
        below: a token counts as unlikely if its probability is at most this.
    """
    if at == "parts":
        cut = writer.policy.cut(writer.completions(attempts, scored=True)).parts
        assert cut is not None
        return [[k + 1 for k, (one, two) in enumerate(pairwise(ids)) if two > one] for ids in cut.ids]
    return [every_unlikely(one.log_probs, every, below) for one in attempts]


def every_unlikely(log_probs: Sequence[float], every: int, below: float) -> list[int]:
    """Numbers of tokens after each `every`-th token of a probability of at most `below`; the end is left out."""
    unlikely = [k + 1 for k, value in enumerate(log_probs) if value <= math.log(below)]
    return [place for place in unlikely[every - 1 :: every] if place < len(log_probs)]


counts_tokens = idle(
    "every", "below", where=lambda choice: choice["at"] == "parts", why="with at parts, no tokens are counted"
)  # fmt: skip
"""A need of forms with an option `at`: what counts tokens has an effect only with `at: tokens`."""


def has_parts(recipe: Any, choice: Choice) -> list[str]:
    """A need of forms with an option `at`: `at: parts` takes the parts that the recipe cuts."""
    if choice["at"] != "parts" or recipe.parts is not None:
        return []
    return [
        f"form {choice.short} cuts at the parts of completions, and nothing says how they are cut; add a section such "
        "as parts: {cut: lines}, or use at tokens"
    ]


def place_of(ids: Sequence[int], words: Sequence[int]) -> int | None:
    """Number of tokens before the first place where `words` stand in `ids`; None if they are not there."""
    count = len(words)
    found = (k for k in range(len(ids) - count + 1) if list(ids[k : k + count]) == list(words))
    return next(found, None)
