"""Every visit of a prompt is a new variant of it, with a calculated answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.addressing import address
from ...parts.needs import Need, alone, needs
from ...parts.ranges import Given
from ..data import PromptRow
from ..prompts.variants_of_prompts import VARIABLES, variant_of
from .extension import Extension
from .rules import draws_last, once, without

KEEPS = "keeps completions of a prompt"


@needs(
    once, draws_last("fills in the prompts"),
    alone("given", "makes other prompts, to which the samples of the data do not belong"),
    without("makes a prompt another one at its next visit", replay=KEEPS, visits=KEEPS),
    Need("model.release_text_encoders", (False,), "makes new prompts in every iteration", task="images",
         mend="set it to false, because else all prompts are encoded before the run"),
)  # fmt: skip
class Variants(Extension):
    """Fills in the slots of training prompts anew at every visit, and calculates their answers (VeRA, 2602.13217).

    A prompt with a column `variables`, such as {"prompt": "{a}+{b}=", "variables": {"a": [1, 99], "b": [1, 99]},
    "answer": "a + b"}, is a template: see `variant_of`. Other prompts stay as they are. The values depend on the seed
    of the run, the iteration and the place of the prompt in it. Held-out prompts are not filled in.

    Args:
        column: Column that is calculated from the values.
    """

    def __init__(self, *, column: str = "answer", recipe: Given[Any]) -> None:
        self.column, self.seed, self._checked = column, recipe.run.seed, False

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
