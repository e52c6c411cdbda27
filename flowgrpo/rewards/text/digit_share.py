"""Digits: a reward that needs no data and no model. It shows whether a language model learns at all."""

from __future__ import annotations

from collections.abc import Sequence


def digit_share(completions: Sequence[str], prompts: Sequence[str]) -> list[float]:
    """Share of the characters of a completion that are digits, 0 to 9.

    Args:
        completions: B strings.
        prompts: B strings, not used.

    Returns:
        B shares in [0, 1]; 0 for an empty completion.
    """
    return [sum(character in "0123456789" for character in text) / max(len(text), 1) for text in completions]
