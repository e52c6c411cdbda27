"""Prompts that two files have in common: the same prompts, and prompts that share most of their words.

A run on prompts that an earlier fine-tuning has seen gains less ("SFT-GRPO Data Overlap as a Post-Training
Hyperparameter for Autoformalization"), and held-out prompts that were trained on measure nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .prompt_rows import PromptRow

RUN, MOST_RUNS = 8, 0.5
"""Two prompts are close if they share at least this share of the runs of this many words and signs."""
MOST_ASKED, MOST_KNOWN = 2_000, 20_000
"""Most prompts of the two files whose runs are compared. More prompts would keep a command waiting."""
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Overlap:
    """How many prompts of one file are in another.

    Attributes:
        total: prompts of the first file.
        same: prompts of it that are in the second file too; differences in white space do not count.
        asked: prompts of it whose runs of words were compared.
        known: prompts of the second file to which they were compared.
        close: compared prompts that are not the same as another, but share most of their runs of words.
    """

    total: int
    same: int
    asked: int
    known: int
    close: int


def overlap_of(rows: Sequence[PromptRow], others: Sequence[PromptRow]) -> Overlap:
    """How many prompts are among others. Of long files, prompts at equal distances are compared word by word.

    A prompt is close to the others if at least half of its runs of 8 words and signs are in any of them. Case does not
    count. A prompt with fewer words is one run. All prompts are looked at for equal ones.

    Args:
        rows: the prompts that may have been seen.
        others: the prompts that were seen.
    """
    seen = {said(row) for row in others}
    same = sum(said(row) in seen for row in rows)
    asked, known = _spread(rows, MOST_ASKED), _spread(others, MOST_KNOWN)
    wanted = {row.id: set(_runs(said(row))) for row in asked if said(row) not in seen}
    sought = {run for runs in wanted.values() for run in runs}
    found = {run for row in known for run in _runs(said(row)) if run in sought}
    close = sum(len(runs & found) >= MOST_RUNS * len(runs) for runs in wanted.values())
    return Overlap(len(rows), same, len(asked), len(known), close)


def overlap_lines(rows: Sequence[PromptRow], name: str, others: Sequence[PromptRow], other: str) -> Iterator[str]:
    """The lines of a report: how many prompts of one file, called `name`, are the same as others, or close to them."""
    found = overlap_of(rows, others)
    yield f"{name}: {found.same:,} of {found.total:,} prompts are in {other} too"
    some = f"{found.total - found.same:,} other prompts"
    if found.asked < found.total or found.known < len(others):
        some = f"{found.asked:,} prompts that were compared with {found.known:,} of {other}"
    yield f"{name}: {found.close:,} of {some} share at least half of their runs of {RUN} words with {other}"


def said(row: PromptRow) -> str:
    """The words of a prompt or conversation and of its further texts, and the paths of its pictures.

    Spaces make no difference.
    """
    words = [row.text] if row.messages is None else [f"{m['role']}: {m['content']}" for m in row.messages]
    shown = () if row.pictures is None else row.pictures if isinstance(row.pictures, tuple) else (row.pictures,)
    pictures = (*shown, *row.conditions.values())
    return " ".join(" ".join([*words, *row.texts.values(), *(str(one.path.resolve()) for one in pictures)]).split())


def _spread(rows: Sequence[PromptRow], most: int) -> Sequence[PromptRow]:
    """At most `most` prompts, at equal distances."""
    return rows[:: -(-len(rows) // most) or 1]


def _runs(text: str) -> Iterator[int]:
    """Hashes of the runs of words and signs of a text; of the whole text if it is shorter than a run."""
    words = _WORD.findall(text.casefold())
    for first in range(max(len(words) - RUN + 1, 1)):
        yield hash(tuple(words[first : first + RUN]))
