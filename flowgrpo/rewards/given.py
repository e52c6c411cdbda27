"""The ranks or scores that the data give to images and completions which stand in the place of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .within import signature_of


class Given:
    """How the data rank given samples, for sampler plan `given` of images and form `given` of text.

    The first sample of a prompt has 1, the last has 0, and the samples between them are evenly spaced. If the data have
    scores of their own, `scores` names their columns. Pick-a-Pic, for example, has `label_0` and `label_1`: 1 for the
    better image, 0 for the other, and 0.5 for both of a tie. True counts as 1, and false as 0.

    Args:
        scores: columns with a number for each sample, in the order of the columns that hold the samples. Without them,
            the order of the columns is the rank.

    Raises:
        ValueError: a column is named twice.
    """

    name = "given"

    def __init__(self, scores: Sequence[str] = ()) -> None:
        if isinstance(scores, str) or len(set(scores)) < len(scores):
            raise ValueError(f"given: scores is {scores!r}; give a list of columns, one for each sample of a prompt")
        self.scores = list(scores)
        self.__signature__ = signature_of("prompts", "given_place", "given_places", *self.scores)

    def __call__(
        self,
        prompts: Sequence[str],
        given_place: Sequence[int],
        given_places: Sequence[int],
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return the rank or the score of each image or completion.

        Args:
            prompts: B texts, not used.
            given_place: B places of the samples among the samples of their prompts, 0 for the best.
            given_places: B numbers of samples of a prompt.
            columns: name -> B numbers.

        Returns:
            B numbers, None where the data have no score.

        Raises:
            ValueError: there is not one column of scores for each sample, or a score is no number.
        """
        if not self.scores:
            return [1.0 - place / max(count - 1, 1) for place, count in zip(given_place, given_places)]
        if given_places and given_places[0] != len(self.scores):
            raise ValueError(
                f"given: scores names {len(self.scores)} columns, and a prompt has {given_places[0]} samples; name one "
                "column for each sample"
            )
        return [score_of(columns[self.scores[place]][row], self.scores[place]) for row, place in enumerate(given_place)]


def score_of(value: Any, column: str) -> float | None:
    """The score in a column of the data; 1 or 0 for true or false, and None for a sample without one.

    Raises:
        ValueError: it is no number.
    """
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"given: column `{column}` has {value!r:.80}; write a number for each sample, or null")
    return float(value)
