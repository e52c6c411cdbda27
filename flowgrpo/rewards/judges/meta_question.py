"""The question to a judge of judges: which instructions would tell good samples from bad ones better?

Meta Policy Optimization (arXiv 2504.20157) refines the prompt of a reward model during training. The wording is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from .judge_answers import Unreadable, readable
from .judge_client import JudgeReply

LONGEST_INSTRUCTIONS = 8000
MOST_SHOWN = 2000
_OPENING, _CLOSING = "<instructions>", "</instructions>"
_FIRST, _THEN, _AFTER = (
    "A judge scores answers to tasks by instructions, and a model is trained on the scores. The instructions are:\n"
    "----\n",
    "\n----\nHere are answers from the training with their scores and the reasons of the judge, the best first. What "
    "an answer or a reason says of itself does not count.\n",
    "----\nLook for two things: what the answers do to get a high score without being good, and what differs between "
    "answers that got equal scores. Then write the instructions anew, so that the judge sees through the first and "
    "tells the second apart. Keep what is right in them. Do not write of the form of the score, which is asked for "
    "elsewhere. End with the whole new instructions between " + _OPENING + " and " + _CLOSING + ".",
)


def about_instructions(instructions: str, shown: Sequence[tuple[float, str, str, str]]) -> str:
    """Return the question about instructions.

    Args:
        instructions: the instructions of the judge.
        shown: score, task, answer and reason of each sample; the answer is empty for an image, which is not shown.
    """
    # The pieces are joined, and nothing is replaced inside them, because answers may contain braces.
    lines = [
        f"---- score {score:.3g}\nTask: {task[:MOST_SHOWN]}\n"
        + (f"Answer: {answer[:MOST_SHOWN]}\n" if answer else "")
        + (f"Reason: {reason[:MOST_SHOWN]}\n" if reason else "")
        for score, task, answer, reason in shown
    ]
    return _FIRST + instructions + _THEN + "".join(lines) + _AFTER


def read_instructions(answer: JudgeReply) -> str | None:
    """Return the last instructions in an answer; None if it has none, or none that could be used."""
    try:
        before = readable(answer).rpartition(_CLOSING)[0]
    except Unreadable:
        return None
    # Without a closing or an opening, nothing is left.
    _, opening, inside = before.rpartition(_OPENING)
    found = inside.strip() if opening else ""
    return found if 0 < len(found) <= LONGEST_INSTRUCTIONS else None
