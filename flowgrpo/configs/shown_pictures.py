"""What a recipe must be like whose prompts show pictures to a language model."""

from __future__ import annotations

from typing import Any


def pictures_are_shown(recipe: Any, section: Any) -> list[str]:
    """Faults of a recipe of text with `model.pictures`: engines and settings that have no pictures for them.

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
    return faults
