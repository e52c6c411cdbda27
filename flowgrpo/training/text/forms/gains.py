"""Completions with what each of their segments added to the probability of the right answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ....parts.needs import needs
from ....parts.ranges import Count, Fraction, Words
from ....text.pictured import followed
from .places import CLOSING, At, counts_tokens, cuts_of, has_parts

if TYPE_CHECKING:
    from ..writing import Attempt, Writer


@needs(has_parts, counts_tokens)
def gains(
    writer: Writer,
    *,
    column: str = "answer",
    closing: Words = CLOSING,
    at: At = "tokens",
    every: Count = 32,
    below: Fraction = 1.0,
) -> list[Attempt]:
    """Completions with the gains of their segments (IGPO, arXiv 2510.14967), for credit `gains`.

    The gain of a segment is p after it minus p before it. p is the policy's probability of the right answer after
    what was written so far and `closing`: the geometric mean of the probabilities of the answer's tokens. The last
    segment has no gain, because the reward of the completion judges it.

    Args:
        writer: writes, and asks the policy for log-probs.
        column: column of the prompts with the right answer; the first one if there are several.
        closing: the words after which the answer is expected.
        at: where segments end: after a number of `tokens`, or at the `parts` of the recipe.
        every: tokens of a segment, for `at: tokens`.
        below: a token counts if its probability is at most this; with 1, all tokens count.

    Raises:
        ValueError: a prompt has no right answer.
    """
    answers = [writer.ids(answer_of(row.columns.get(column), column, row.text)) for row in writer.rows]
    written = writer.write(writer.starts())
    cuts = cuts_of(writer, written, at, every, below)
    words = writer.ids(closing)
    asked: list[Attempt] = []
    for one, places in zip(written, cuts):
        for place in [0, *places]:
            known = one.cut(place)
            said = followed(known.context, [*known.ids, *words])
            asked.append(replace(known, context=said, ids=answers[one.prompt]))
    chances = torch.stack([values.double().mean().exp() for values in writer.log_probs(asked)])
    each = chances.split([1 + len(places) for places in cuts])
    origins = [{"cuts": places, "gains": own.diff().tolist()} for places, own in zip(cuts, each)]
    return [replace(one, origin=origin) for one, origin in zip(written, origins)]


def answer_of(value: object, column: str, prompt: str) -> str:
    """The right answer in a column as text; raises ValueError if there is none."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if first in (None, "", [], ()):
        raise ValueError(
            f"form gains asks for the probability of the right answer, and the prompt {prompt!r:.80} has none in "
            f"column {column!r}; fill the column, or name another with form.column"
        )
    return str(first)
