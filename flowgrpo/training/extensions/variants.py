"""Every visit of a prompt is a new variant of it, with a calculated answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.addressing import address
from ...parts.choice import Choice
from ...parts.needs import needs
from ...parts.ranges import Given
from ..data import PromptRow
from ..prompts.variants_of_prompts import VARIABLES, variant_of
from .extension import Extension, once


def _prompts_pass(recipe: Any, choice: Choice) -> list[str]:
    names = [other.short for other in recipe.extensions]
    after = recipe.extensions[names.index(choice.short) + 1 :]
    faults = [
        f"extension {other.short} draws prompts after extension variants has filled them in; put variants last"
        for other in after
        if isinstance(other.target, type)
        and getattr(other.target, "prompts_drawn", None) is not Extension.prompts_drawn
    ]
    faults += [
        f"extension {name} keeps completions of a prompt, and with extension variants the prompt is another one at its "
        "next visit; leave one of them out"
        for name in ("replay", "visits")
        if name in names
    ]
    if recipe.task == "images" and recipe.model.release_text_encoders:
        faults.append(
            "extension variants makes new prompts in every iteration, and model.release_text_encoders encodes all "
            "prompts before the run; set it to false"
        )
    return faults


@needs(once, _prompts_pass)
class Variants(Extension):
    """Fills in the slots of training prompts anew at every visit, and calculates their answers (VeRA, 2602.13217).

    A prompt with a column `variables`, such as {"prompt": "{a}+{b}=", "variables": {"a": [1, 99], "b": [1, 99]},
    "answer": "a + b"}, is a template: see `variant_of`. Other prompts stay as they are. The values depend on the seed
    of the run, the iteration and the place of the prompt in it. Held-out prompts are not filled in.

    Args:
        column: Column that is calculated from the values.
    """

    def __init__(self, *, column: str = "answer", recipe: Given[Any]) -> None:
        self.column, self.seed = column, recipe.run.seed
        self._checked = False

    def prompts_drawn(
        self, rows: Sequence[PromptRow], everything: Sequence[PromptRow], iteration: int
    ) -> Sequence[PromptRow]:
        """Variants of the prompts.

        Raises:
            ValueError: no training prompt is a template, or a template is wrong; see `variant_of`.
        """
        if not self._checked:
            self._check(everything)
        return [
            variant_of(row, self.column, np.random.default_rng(address(self.seed, 9, iteration, place)))
            for place, row in enumerate(rows)
        ]

    def _check(self, everything: Sequence[PromptRow]) -> None:
        """Try every template once, so that a wrong one does not end the run in the middle."""
        for row in everything:
            variant_of(row, self.column, np.random.default_rng(0))
        if not any(row.columns.get(VARIABLES) for row in everything):
            raise ValueError(
                f"extension variants found no training prompt with a column `{VARIABLES}`; write templates, or leave "
                "the extension out"
            )
        self._checked = True
