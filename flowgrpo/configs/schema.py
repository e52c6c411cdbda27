"""The schemas of recipes, by task. YAML keys and dotted command-line overrides have the names of their fields."""

from __future__ import annotations

from .image_recipe import Recipe
from .masked_recipe import MaskedRecipe
from .text_recipe import TextRecipe

__all__ = ["SCHEMAS", "AnyRecipe", "MaskedRecipe", "Recipe", "TextRecipe"]

AnyRecipe = Recipe | TextRecipe | MaskedRecipe
SCHEMAS: dict[str, type[AnyRecipe]] = {"images": Recipe, "text": TextRecipe, "masked": MaskedRecipe}
"""The schema of each task."""
