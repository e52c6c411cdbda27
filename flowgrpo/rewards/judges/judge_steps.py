"""Samples that consist of steps: frames of a video, or the parts into which a recipe cuts completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from .judge_client import Question
from .judge_images import frames_of

Step: TypeAlias = Tensor | str
"""A picture [3, H, W] in [0, 1], or a text."""


def steps_of(
    images: Tensor | None, completions: Sequence[str] | None, parts: Sequence[Sequence[str]] | None, frames: int
) -> list[list[Step]]:
    """Return the steps of B samples. An image is one step, and a completion that is not cut is one step.

    Args:
        images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
        completions: B strings, instead of images.
        parts: B lists of the parts of the completions, if they are cut.
        frames: largest number of frames of a video, evenly spaced.
    """
    if images is not None:
        return [list(frames_of(own, frames)) for own in images]
    return [list(own) for own in parts or [[text] for text in completions or ()]]


def about_step(prompt: str, steps: Sequence[Step], place: int) -> Question:
    """Return what a judge sees of one step, counted from 0: a picture alone, or a text after the texts before it."""
    texts = [step for step in steps[:place] if isinstance(step, str)]
    before = f"What was done before:\n{''.join(texts)}\n----\n" if isinstance(steps[place], str) else ""
    return showing(prompt, before, f"Step {place + 1} of {len(steps)}", steps[place])


def showing(prompt: str, before: str, name: str, step: Step, then: str = "") -> Question:
    """Return a question on a task: what comes before a step, the step under its name, and what is asked then."""
    # The pieces are joined, and nothing is replaced inside them, because prompts and steps may contain braces.
    text = f"The task was:\n----\n{prompt}\n----\n{before}"
    if isinstance(step, str):
        return Question(f"{text}{name}:\n{step}\n----\n{then}")
    return Question(f"{text}{name} is the picture.\n{then}", (step,))
