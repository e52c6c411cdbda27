"""Completions cut into parts, at lines, sentences or matches of a regular expression, and the part of each token."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

CUTS = {
    "lines": r"\n",
    # White space must follow a full stop, because otherwise every decimal number would be two sentences.
    "sentences": r"[.!?…]+[\"'”’»)\]]*(?=\s)|[。！？]+[”’」』）]*|\n",
}
"""Name of a cut -> regular expression. A part ends where a match of the expression ends."""

STRIDE = 32
"""Largest number of tokens that are decoded together, to find out whether they all belong to one part."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Parts:
    """B completions in parts.

    Attributes:
        texts: B lists of consecutive texts. No text is blank, except that a blank completion is one part.
        ids: B lists with the part number of each token, from 0.
    """

    texts: list[list[str]]
    ids: list[list[int]]


def cut_completions(texts: Sequence[str], ids: Sequence[Sequence[int]], decode: Decode, pattern: str) -> Parts:
    """Cut completions where matches of a pattern end; a part of white space alone is joined to the part before it.

    Args:
        texts: B completions, each the result of `decode` for its tokens.
        ids: B lists of token ids, without padding.
        decode: function from tokens to text, of the tokenizer of the completions.
        pattern: regular expression; `CUTS` has two.

    Returns:
        The parts. A token belongs to the part in which it begins. A token across a border belongs to the part before
        the border. A token that completes a character belongs to the part of this character. A token without
        characters, such as the end token, belongs to the part of the next character; at the end of the text it belongs
        to the last part.
    """
    ends = re.compile(pattern)
    starts = [_starts(text, ends) for text in texts]
    return Parts(
        [[text[here:after] for here, after in pairwise([*own, len(text)])] for text, own in zip(texts, starts)],
        [_token_parts(text, of, own, decode) for text, of, own in zip(texts, ids, starts)],
    )


def _starts(text: str, ends: re.Pattern[str]) -> list[int]:
    """Indices of the characters at which the parts begin; the first is 0."""
    first = len(text) - len(text.lstrip())
    found = [*dict.fromkeys(match.end() for match in ends.finditer(text)), len(text)]
    kept = [here for here, after in pairwise(found) if here > first and text[here:after].strip()]
    return [0, *kept]


def _token_parts(text: str, ids: Sequence[int], starts: Sequence[int], decode: Decode) -> list[int]:
    """The part of each token. Tokens are decoded a few at a time, and one by one only next to a border.

    The text of a token depends on the tokens before it. So tokens are decoded together with earlier tokens whose text
    is known.
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
            # The last token begins a character. The tokens that complete the character begin in its part.
            while not text.startswith(all_of_it := decode(ids[:until])) and until < len(ids):
                known = max(known, sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(all_of_it, text))))
                found.append(part_at(known))
                until += 1
            end = len(all_of_it)
        last = decode(ids[done:until])
        # After tokens without characters, the next text would be decoded as if it were the first. So the anchor stays.
        anchor, behind = (done, last) if last.strip() else (anchor, behind + text[begun:end])
        known, stride = end, min(2 * stride, STRIDE)
    return found
