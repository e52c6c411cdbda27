"""Whether a prompt and its completion fit into a language model."""

from __future__ import annotations

from ...configs.explaining import short


def check_room(room: int, prompt: str, given: int, tokens: int, key: str) -> None:
    """Check that a prompt and a completion fit into a number of tokens.

    Args:
        room: tokens of a prompt and its completion.
        prompt: for the message.
        given: tokens of the prompt.
        tokens: of the longest completion.
        key: key of the recipe with `tokens`.

    Raises:
        ValueError: they do not fit.
    """
    if given + tokens > room:
        fits = f"set {key} (`flowgrpo sample`: --max-tokens) to at most {room - given}"
        raise ValueError(
            f"the prompt {short(prompt)} has {given} tokens and {key} is {tokens}, but the model has positions for "
            f"{room} tokens in all; {fits if given < room else 'shorten the prompt'}"
        )
