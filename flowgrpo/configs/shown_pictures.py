"""What a recipe must be like whose prompts show pictures to a language model."""

from __future__ import annotations

from typing import Any

WITHOUT_PICTURES = ("past_groups", "teacher")
"""Extensions that have prompts as words alone."""


def pictures_are_shown(recipe: Any, section: Any) -> list[str]:
    """Faults of a recipe of text with `model.pictures`: parts that keep or ask prompts have no pictures for them.

    Args:
        recipe: of text.
        section: its section `model`.
    """
    if not section.pictures:
        return []
    faults = []
    if section.chat is False:
        faults.append("model.pictures shows pictures through the chat template, and model.chat is false; leave it out")
    if recipe.generation.engine != "transformers":
        faults.append(
            f"model.pictures is true, and generation.engine {recipe.generation.engine} gets prompts without pictures; "
            "use engine transformers"
        )
    faults += [
        f"model.pictures is true, and extension {choice.name} keeps or asks prompts without pictures; leave it out"
        for choice in recipe.extensions
        if choice.name in WITHOUT_PICTURES
    ]
    return faults
