"""What stands for a picture in the words of a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence

MARK = "<image>"
"""Stands in the text of a prompt for its next picture."""
PART = "\ufffc"
"""Stands for the next picture where a message was written as a list of texts and pictures."""


def marked(texts: Sequence[str], pictures: int) -> bool:
    """Whether marks say where the pictures of a prompt are.

    Args:
        texts: of the prompt, or of the messages of a conversation.
        pictures: how many the prompt has.

    Raises:
        ValueError: there are marks, and not one for each picture.
    """
    marks = sum(text.count(MARK) + text.count(PART) for text in texts)
    if marks not in (0, pictures):
        raise ValueError(
            f"a prompt has {marks} times {MARK} and {pictures} picture{'' if pictures == 1 else 's'}; write {MARK} "
            "once for each picture, or nowhere"
        )
    return marks > 0


def without_marks(text: str, others: Sequence[str] = ()) -> str:
    """A text in which nothing stands for a picture: the letters of a mark stay, without its brackets.

    Args:
        text: what a model or a tool wrote, or a column of a prompt file.
        others: texts that stand for pictures beside `MARK` and `PART`, such as special tokens.
    """
    found = "|".join(map(re.escape, sorted((MARK, PART, *others), key=len, reverse=True)))
    return re.sub(found, lambda match: re.sub(r"\W", "", match[0]), text)
