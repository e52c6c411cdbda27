"""Reads from a judge's answer which of two samples it prefers."""

from __future__ import annotations

import math
import re

from .judge_answers import NUMBER, Unreadable, tagged

_THING = r"(?:image|video|picture|answer|response|text)"
_SAID = re.compile(
    rf"\b{_THING}\s*([12])\s+is\s+(?:(?!(?:not|no|never|hardly)\b)\w+\s+){{0,2}}better\b"
    r"|\bequally\s+(?:good|bad)\b|\b(?:is|it's|it’s)\s+a\s+tie\b|^[^\w\n]{0,20}tie[^\w\n]{0,20}$",
    re.IGNORECASE | re.MULTILINE,
)
_NAMED = re.compile(rf"\s*{_THING}\s*([12])\s*[.!]?\s*", re.IGNORECASE)
_AFTER = rf"(?:points?|out|of|and|or|vs|versus|while|but|{_THING})"
_SCORES = re.compile(rf"\b{_THING}\s*([12])\s*:\s*({NUMBER})(?![ \t]+(?!{_AFTER}\b)[^\W\d])", re.IGNORECASE)
_MARKS = re.compile(r"[*_`#]")
"""Signs of Markdown, which judges put around what they emphasise."""


def read_preference(text: str) -> float:
    """Return the preference for the first of two samples.

    An answer has one of the following forms. If it has several, the first form counts. Markdown makes no difference.

        "Image 1 is better", "Image 2 is better", "... equally good" or "tie": 1, 0 and 1/2. The last of these phrases
            counts. Up to two words may stand before "better". If there is an <answer> tag, only the content of the
            last one counts.
        "Image 1" alone within the <answer> tag: 1, and "Image 2": 0.
        "Image 1: 0.6", "Image 2: 0.4", once for each axis: the mean of s1 / (s1 + s2) over the axes, where 0 and 0
            give 1/2. Scores are 0 or more. A number of things is no score, as in "Image 1: 2 cats".

    "Video", "Picture", "Answer", "Response" and "Text" are read in the same way as "Image".

    Args:
        text: text of the answer, without the reasoning before it.

    Returns:
        A number in [0, 1].

    Raises:
        Unreadable: the answer has none of the forms, or a score is out of range.
    """
    inside = tagged(text, "answer")
    part = _MARKS.sub("", text if inside is None else inside)
    if inside is not None and (named := _NAMED.fullmatch(part)):
        return 1.0 if named[1] == "1" else 0.0
    said = _SAID.findall(part)
    if said:
        return {"1": 1.0, "2": 0.0}.get(said[-1], 0.5)
    scores = [(number, float(score)) for number, score in _SCORES.findall(part)]
    if not scores or [number for number, _ in scores] != ["1", "2"] * (len(scores) // 2):
        raise Unreadable("the answer does not say which sample is better")
    if any(not 0 <= score < math.inf for _, score in scores):
        raise Unreadable("a score is below 0, or too large to be read")
    axes = [(scores[k][1], scores[k + 1][1]) for k in range(0, len(scores), 2)]
    return sum(one / (one + other) if one + other else 0.5 for one, other in axes) / len(axes)
