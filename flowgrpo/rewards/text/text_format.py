"""The form of a completion: its tags, and a regular expression that it should match.

Format rewards are used in DeepSeek-R1 (arXiv 2501.12948, section 2.2.2). "Surrogate Signals from Format and Length"
(arXiv 2505.19439) uses them in place of reference answers. ReFIne (arXiv 2510.09062) rewards sections that refer to
each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..options import check_flag, check_seconds
from ..scores import Scores
from ..worker import GaveUp, Worker

LONGEST_TEXT = 100_000
TAG = "{tag}"
_TAG_NAME = re.compile(r"[A-Za-z][\w.-]*")


class TextFormat:
    """1 if a regular expression matches and each tag occurs once and in order; else 0, or a share with `partial`.

    Args:
        pattern: a regular expression that must match the whole completion, without the white space around it. `.`
            matches line ends too. The pattern runs in a separate process. If it takes longer than `seconds`, it is
            given up, and counts as no match. A completion of more than 100,000 characters is no match.
        tags: names such as [think, answer]: `<think>...</think>` must occur exactly once, and after it
            `<answer>...</answer>` exactly once. Text between the tags does not matter.
        references: tag -> tags to which the text within it must refer, as in {think: [facts, plan]}.
        reference: how a reference is written, with `{tag}` for the name of the tag.
        partial: if true, the value is the mean of the sub-scores. If false, it is 1 if all sub-scores are 1, and 0
            otherwise.
        seconds: how long the pattern may take for one completion.

    Raises:
        ValueError: an option is wrong, or neither `pattern` nor `tags` is given.
    """

    name = "text_format"

    def __init__(
        self,
        pattern: str | None = None,
        tags: Sequence[str] = (),
        partial: bool = False,
        seconds: float = 2.0,
        references: Mapping[str, Sequence[str]] | None = None,
        reference: str = f"[{TAG}]",
    ) -> None:
        if pattern is None and not tags:
            raise ValueError("text_format: give `pattern`, a regular expression, or `tags`, such as [think, answer]")
        try:
            re.compile(pattern or "")
        except (re.error, TypeError) as error:
            raise ValueError(f"text_format: pattern {pattern!r} is not a regular expression: {error}") from None
        check_tags(self.name, "tags", tags)
        check_flag(self.name, "partial", partial)
        check_seconds(self.name, seconds)
        self.pattern, self.tags, self.partial, self.seconds = pattern, list(tags), partial, seconds
        if not isinstance(reference, str) or TAG not in reference:
            raise ValueError(f"text_format: reference is {reference!r}; write {TAG} for the name of a tag")
        self.references = asked_references(self.tags, references or {}, reference)
        self._worker = Worker(f"{__package__}.extraction:matches")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str]) -> Scores:
        """Check the form of completions.

        Args:
            completions: B strings.
            prompts: B strings, not used.

        Returns:
            Scores with B values in [0, 1]. Sub-scores: `pattern`, 1 for a match; `tags`, the share of the tags that
            open exactly once and then close exactly once; `order`, the share of neighbouring tags in the list of which
            the first closes before the second opens. For a single tag, `order` is equal to `tags`. `references`, the
            share of the asked references that are made, if any are asked for.
        """
        subs: dict[str, list[float]] = {}
        notes = [""] * len(completions)
        if self.pattern is not None:
            subs["pattern"] = [self._match(text.strip(), notes, row) for row, text in enumerate(completions)]
        if self.tags:
            subs["tags"], subs["order"] = map(list, zip(*(tag_shares(text, self.tags) for text in completions)))
        if self.references:
            subs["references"] = [reference_share(text, self.references) for text in completions]
        rows = list(zip(*subs.values()))
        values = [math.fsum(row) / len(row) if self.partial else float(min(row) == 1) for row in rows]
        return Scores(values, subs, notes)

    def close(self) -> None:
        """End the process that matches."""
        self._worker.close()

    def _match(self, text: str, notes: list[str], row: int) -> float:
        if len(text) > LONGEST_TEXT:
            notes[row] = f"{len(text)} characters are too long for the pattern"
            return 0.0
        try:
            return float(self._worker(self.pattern, text, seconds=self.seconds))
        except GaveUp as error:
            notes[row] = f"the pattern was given up: {error}"
            return 0.0


def check_tags(reward: str, name: str, tags: Any) -> None:
    """Refuse an option that is not a list of different names of tags."""
    listed = isinstance(tags, (list, tuple)) and all(isinstance(tag, str) and _TAG_NAME.fullmatch(tag) for tag in tags)
    if not listed or len(set(tags)) < len(tags):
        raise ValueError(
            f"{reward}: {name} is {tags!r}; give different names without brackets, such as [think, answer]"
        )


def asked_references(tags: Sequence[str], references: Any, written: str) -> list[tuple[str, str]]:
    """Pairs of a tag and a reference, as it must be written within the tag.

    Args:
        tags: all tags.
        references: tag -> tags to which it must refer.
        written: how a reference is written, with `{tag}` for the name.

    Raises:
        ValueError: a name is not the name of a tag, or a tag refers to itself.
    """
    fits = isinstance(references, Mapping) and all(isinstance(named, (list, tuple)) for named in references.values())
    pairs = [(own, other) for own, named in references.items() for other in named] if fits else []
    if not fits or any(own not in tags or other not in tags or own == other for own, other in pairs):
        raise ValueError(
            f"text_format: references is {references!r}; give for a tag the other tags to which it must refer, as in "
            f"{{think: [facts]}}; the tags are {', '.join(tags) or 'none'}"
        )
    return [(own, written.replace(TAG, other)) for own, other in pairs]


def reference_share(text: str, references: Sequence[tuple[str, str]]) -> float:
    """Return the share of references that are within their tags; see `asked_references`."""
    return sum(reference in (section_of(text, own) or "") for own, reference in references) / len(references)


def section_of(text: str, tag: str) -> str | None:
    """Return the text within a tag; None unless the tag opens exactly once and then closes exactly once."""
    span = _span(text, tag)
    return None if span is None else text[span[0] + len(f"<{tag}>") : span[1] - len(f"</{tag}>")]


def tag_shares(text: str, tags: Sequence[str]) -> tuple[float, float]:
    """Return the share of the tags that occur once, and the share of the neighbouring tags that are in order."""
    spans = [_span(text, tag) for tag in tags]
    once = sum(span is not None for span in spans) / len(tags)
    apart = [first is not None and second is not None and first[1] <= second[0] for first, second in pairwise(spans)]
    return once, sum(apart) / len(apart) if apart else once


def _span(text: str, tag: str) -> tuple[int, int] | None:
    """Return start and end of a tag's element; None unless the tag opens exactly once and then closes exactly once."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start, end = text.find(opening), text.find(closing)
    if text.count(opening) != 1 or text.count(closing) != 1 or end < start:
        return None
    return start, end + len(closing)
