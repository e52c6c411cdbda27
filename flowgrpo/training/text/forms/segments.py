"""Completions that are continued several times from the ends of their segments, to value these places."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ....parts.needs import needs
from ....parts.ranges import Count, Fraction
from .places import At, counts_tokens, cuts_of, has_parts

if TYPE_CHECKING:
    from ..writing import Attempt, Writer


@needs(has_parts, counts_tokens)
def segments(
    writer: Writer, *, samples: Count = 9, at: At = "tokens", every: Count = 5, below: Fraction = 0.9
) -> list[Attempt]:
    """Completions are continued from the ends of their segments (SPO, 2505.23564; VinePPO, 2410.01679).

    The continuations are scored and not trained. The mean of their rewards is the value of the place, for credit
    `segments`. Completions are sampled as usual, and a completion with K + 1 segments costs K times `samples` more.

    Args:
        writer: writes.
        samples: continuations from each end of a segment. The end of the completion needs none.
        at: where segments end: after a number of unlikely `tokens` (SPO), or at the `parts` of the recipe (VinePPO).
        every: unlikely tokens of a segment, for `at: tokens`.
        below: a token counts as unlikely if its probability is at most this; with 1, all tokens count.
    """
    written = writer.write(writer.starts())
    cuts = cuts_of(writer, written, at, every, below)
    named: list[Attempt] = []
    openings: list[Attempt] = []
    for k, (one, places) in enumerate(zip(written, cuts)):
        number = k % writer.group
        named.append(replace(one, origin={"number": number, "cuts": places}))
        openings += [
            replace(one.cut(place), counts=False, origin={"number": number, "token": place})
            for place in places
            for _ in range(samples)
        ]
    return named + writer.write(openings, stage=1)
