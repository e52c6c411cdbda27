"""Completions cut into parts, at lines or sentences or where a regular expression says, and the part of each token."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

CUTS = {
    "lines": r"\n",
    # A full stop needs white space after it, or every decimal number would be two sentences.
    "sentences": r"[.!?…]+[\"'”’»)\]]*(?=\s)|[。！？]+[”’」』）]*|\n",
}
"""Name of a cut -> regular expression; a part ends where a match of it ends."""

STRIDE = 32
"""Most tokens that are decoded to learn whether they are all of one part."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Parts:
    """B completions in parts.

    Attributes:
        texts: B lists of texts which follow one another; none is blank but of a blank completion, which is one part.
        ids: B lists, of each token the number of its part, from 0.
    """

    texts: list[list[str]]
    ids: list[list[int]]


def cut_completions(texts: Sequence[str], ids: Sequence[Sequence[int]], decode: Decode, pattern: str) -> Parts:
    """Cut completions where matches of a pattern end; white space alone is no part and joins the one before it.

    Args:
        texts: B completions, each what `decode` makes of its tokens.
        ids: B lists of token ids, without padding.
        decode: text of tokens, by the tokenizer of the completions.
        pattern: regular expression; `CUTS` has two.

    Returns:
        The parts. A token belongs to that in which it begins: one that reaches over a border to the part before the
        border, one that completes a character to the part of that character, and one without characters, such as that
        which ends the text, to the part of the character after it, or in the end to the last part.
    """
    ends = re.compile(pattern)
    starts = [_starts(text, ends) for text in texts]
    return Parts(
        [[text[here:after] for here, after in pairwise([*own, len(text)])] for text, own in zip(texts, starts)],
        [_token_parts(text, of, own, decode) for text, of, own in zip(texts, ids, starts)],
    )


def _starts(text: str, ends: re.Pattern[str]) -> list[int]:
    """Characters at which the parts begin; 0 is the first."""
    first = len(text) - len(text.lstrip())
    found = [*dict.fromkeys(match.end() for match in ends.finditer(text)), len(text)]
    kept = [here for here, after in pairwise(found) if here > first and text[here:after].strip()]
    return [0, *kept]


def _token_parts(text: str, ids: Sequence[int], starts: Sequence[int], decode: Decode) -> list[int]:
    """The part of each token. Few tokens are decoded at a time, and all alone only next to a border.

    What tokens add to a text depends on those before them, so they are decoded behind others whose text is known.
    """
    if len(starts) == 1:
        return [0] * len(ids)

    def part_at(character: int) -> int:
        return bisect_right(starts, character) - 1

    found: list[int] = []
    anchor, stride, known, behind = 0, STRIDE, 0, ""
    while (done := len(found)) < len(ids):
        until, begun = min(done + stride, len(ids)), known
        decoded = decode(ids[anchor:until])
        end = begun + len(decoded) - len(behind)
        whole = decoded.startswith(behind) and text.startswith(decoded[len(behind) :], begun)
        if until > done + 1 and not (whole and part_at(begun) == part_at(end)):
            stride = max(stride // 2, 1)
            continue
        found += [part_at(begun)] * (until - done)
        if not whole:
            # A beginning of a character, in which the tokens begin that complete it.
            while not text.startswith(all_of_it := decode(ids[:until])) and until < len(ids):
                known = max(known, sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(all_of_it, text))))
                found.append(part_at(known))
                until += 1
            end = len(all_of_it)
        last = decode(ids[done:until])
        # What stands behind tokens without characters is decoded as if it were the first.
        anchor, behind = (done, last) if last.strip() else (anchor, behind + text[begun:end])
        known, stride = end, min(2 * stride, STRIDE)
    return found
