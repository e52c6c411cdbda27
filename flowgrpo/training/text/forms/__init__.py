"""The forms of a rollout of text that a recipe chooses by name: how the completions of a prompt come about.

A form is a function `(writer, *, ...) -> attempts`. It says what is written from which context, what is cut and what is
continued; the `Writer` writes it. Attempts may have contexts of their own (a hint, a draft), and tokens that the policy
did not draw (the answer of a tool). Such tokens are not trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ....parts.choice import Choice
from ....parts.traits import offering
from .by_entropy import by_entropy
from .exits import anytime, elastic, exits
from .expert import expert
from .from_data import given
from .gains import gains
from .greedy import greedy
from .hints import hints, rewritten, self_hints
from .second_attempts import critiques, drafts, retries
from .segments import segments
from .subgroups import subgroups
from .turns import branches, turns

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ..writing import Attempt, Writer

PLAIN = "plain"


def plain(writer: Writer) -> list[Attempt]:
    """Every completion of a prompt is written from its beginning to its end."""
    return writer.write(writer.starts())


def _own_sampler(recipe: Any, choice: Choice) -> list[str]:
    """Faults of a recipe: another engine only completes prompts."""
    engine = recipe.generation.engine
    if choice.name == PLAIN or engine == "transformers":
        return []
    if offering(choice, "given"):
        return [
            f"form {choice.short} takes completions from the data, so generation.engine {engine} would only wait; use "
            "generation.engine transformers"
        ]
    return [
        f"form {choice.short} continues completions, and generation.engine {engine} only completes prompts; use "
        "generation.engine transformers"
    ]


NEEDS = (_own_sampler,)
"""What every form needs from a recipe."""

FORMS: dict[str, Callable[..., list[Attempt]]] = {
    PLAIN: plain,
    "by_entropy": by_entropy,
    "expert": expert,
    "given": given,
    "segments": segments,
    "exits": exits,
    "anytime": anytime,
    "elastic": elastic,
    "subgroups": subgroups,
    "greedy": greedy,
    "gains": gains,
    "hints": hints,
    "self_hints": self_hints,
    "rewritten": rewritten,
    "drafts": drafts,
    "critiques": critiques,
    "retries": retries,
    "turns": turns,
    "branches": branches,
}
"""`form(writer, *, ...) -> attempts`."""
