"""The form of a completion: its tags, and a regular expression that it should match.

Format rewards are used in DeepSeek-R1 (arXiv 2501.12948, section 2.2.2). "Surrogate Signals from Format and Length"
(arXiv 2505.19439) uses them in place of reference answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from ..options import check_flag, check_seconds
from ..scores import Scores
from ..worker import GaveUp, Worker

LONGEST_TEXT = 100_000
_TAG_NAME = re.compile(r"[A-Za-z][\w.-]*")


class TextFormat:
    """1 if a regular expression matches and each tag occurs once and in order; else 0, or a share with `partial`.

    Args:
        pattern: a regular expression that must match the whole completion, without the white space around it. `.`
            matches line ends too. The pattern runs in a separate process. If it takes longer than `seconds`, it is
            given up, and counts as no match. A completion of more than 100,000 characters is no match.
        tags: names such as [think, answer]: `<think>...</think>` must occur exactly once, and after it
            `<answer>...</answer>` exactly once. Text between the tags does not matter.
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
    ) -> None:
        if pattern is None and not tags:
            raise ValueError("text_format: give `pattern`, a regular expression, or `tags`, such as [think, answer]")
        try:
            re.compile(pattern or "")
        except (re.error, TypeError) as error:
            raise ValueError(f"text_format: pattern {pattern!r} is not a regular expression: {error}") from None
        wrong = [tag for tag in tags if not (isinstance(tag, str) and _TAG_NAME.fullmatch(tag))]
        if isinstance(tags, str) or wrong or len(set(tags)) < len(tags):
            raise ValueError(
                f"text_format: tags is {tags!r}; give different names without brackets, such as [think, answer]"
            )
        check_flag(self.name, "partial", partial)
        check_seconds(self.name, seconds)
        self.pattern, self.tags, self.partial, self.seconds = pattern, list(tags), partial, seconds
        self._worker = Worker(f"{__package__}.extraction:matches")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str]) -> Scores:
        """Check the form of completions.

        Args:
            completions: B strings.
            prompts: B strings, not used.

        Returns:
            Scores with B values in [0, 1]. Sub-scores: `pattern`, 1 for a match; `tags`, the share of the tags that
            open exactly once and then close exactly once; `order`, the share of neighbouring tags in the list of which
            the first closes before the second opens. For a single tag, `order` is equal to `tags`.
        """
        subs: dict[str, list[float]] = {}
        notes = [""] * len(completions)
        if self.pattern is not None:
            subs["pattern"] = [self._match(text.strip(), notes, row) for row, text in enumerate(completions)]
        if self.tags:
            subs["tags"], subs["order"] = map(list, zip(*(_tags(text, self.tags) for text in completions)))
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


def _tags(text: str, tags: Sequence[str]) -> tuple[float, float]:
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
