"""Runs that begin from an existing LoRA (`model.lora.start`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..configs.schema import AnyRecipe
from ..weights.adapter_files import read_start
from ..weights.lora import EVERY_LAYER

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is checked without them.
    from ..weights.trained import TrainedWeights


def with_start(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe with the rank, the scale and the layers of its `model.lora.start`; the same recipe if it has none.

    Raises:
        ValueError: the LoRA cannot be read, or the recipe asks for another rank, alpha or layers.
    """
    lora = recipe.model.lora
    if lora.start is None:
        return recipe
    start = read_start(lora.start)
    found = {"rank": start.rank, "alpha": start.alpha}
    wrong = [
        f"model.lora.{key} is {getattr(lora, key):g}, and {lora.start} has {value:g}; write {key}: {value:g}, or leave "
        "it out"
        for key, value in found.items()
        if key in lora.model_fields_set and getattr(lora, key) != value
    ]
    if lora.targets not in (None, [*EVERY_LAYER]) and "targets" in lora.model_fields_set:
        outside = [name for name in start.layers if not any(f".{name}".endswith(f".{end}") for end in lora.targets)]
        if outside:
            wrong.append(
                f"model.lora.targets does not name {outside[0]}, which {lora.start} adapts; leave targets out to take "
                "the layers of the LoRA"
            )
    if wrong:
        raise ValueError("\n".join(wrong))
    taken = {**found, "targets": list(lora.targets or start.layers)}
    model = recipe.model.model_copy(update={"lora": lora.model_copy(update=taken)})
    return recipe.model_copy(update={"model": model})


def begin(weights: TrainedWeights, recipe: AnyRecipe) -> None:
    """Put the LoRA of `model.lora.start` into new adapters, if the recipe has one. The reference is then this model.

    Raises:
        ValueError: the LoRA cannot be read, or does not fit the model.
    """
    if recipe.model.lora.start is not None:
        weights.start_from(read_start(recipe.model.lora.start))
