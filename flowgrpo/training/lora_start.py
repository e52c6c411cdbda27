"""Runs that begin from an existing LoRA (`model.lora.start`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..configs.image_recipe import ModelConfig
from ..configs.schema import AnyRecipe, Recipe
from ..weights.adapter_files import StartAdapter, read_start
from ..weights.lora import EVERY_LAYER, names_layer
from ..weights.lora_conversion import BasePipeline
from .model_paths import embedded_pipeline
from .recipe_findings import Checked, Fault

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is checked without them.
    from ..weights.trained import TrainedWeights


KEY = "model.lora.start"


def base_of(model: ModelConfig, fetches: bool = True) -> BasePipeline:
    """The pipeline of a model, for LoRAs with the names of another tool.

    Args:
        model: of the recipe.
        fetches: whether the index of a hub id may be downloaded.
    """
    path = str(embedded_pipeline()) if model.path == "scenes" else model.path
    return BasePipeline(path, model.pipeline, fetches)


def _start_of(recipe: AnyRecipe, path: str, fetches: bool = True) -> StartAdapter:
    return read_start(path, base_of(recipe.model, fetches) if isinstance(recipe, Recipe) else None)


def check_start(found: Checked) -> None:
    """Check the LoRA of `model.lora.start`, and note what of it a run leaves out. Nothing is downloaded."""
    path = found.recipe.model.lora.start
    if path is not None and found.attempt(KEY, with_start, found.recipe, False) is not None:
        note_left_out(found, KEY, _start_of(found.recipe, path, False))


def note_left_out(found: Checked, key: str, start: StartAdapter) -> None:
    """Note the LoRAs of text encoders in a file, which a run leaves out."""
    if start.left_out:
        text = (
            f"{key}: {', '.join(map(str, start.files))} also adapts {', '.join(start.left_out)}. The run leaves this "
            "out, so the model before training is not quite the one that the file makes elsewhere"
        )
        found.findings.append(Fault("note", text, key))


def with_start(recipe: AnyRecipe, fetches: bool = True) -> AnyRecipe:
    """The recipe with the rank, the scale and the layers of its `model.lora.start`; the same recipe if it has none.

    Args:
        recipe: the recipe.
        fetches: whether the index of a pipeline of the hub may be downloaded. It is needed if the LoRA has the names
            of another tool.

    Raises:
        UnreadBase: the class of the pipeline is not known on this machine, and is needed.
        ValueError: the LoRA cannot be read, or the recipe asks for another rank, alpha or layers.
    """
    lora = recipe.model.lora
    if lora.start is None:
        return recipe
    start = _start_of(recipe, lora.start, fetches)
    found = {"rank": start.rank, "alpha": start.alpha}
    wrong = [
        f"model.lora.{key} is {getattr(lora, key):g}, and {lora.start} has {value:g}; write {key}: {value:g}, or leave "
        "it out"
        for key, value in found.items()
        if key in lora.model_fields_set and getattr(lora, key) != value
    ]
    if lora.targets not in (None, [*EVERY_LAYER]) and "targets" in lora.model_fields_set:
        outside = [name for name in start.layers if not any(names_layer(end, name) for end in lora.targets)]
        if outside:
            wrong.append(
                f"model.lora.targets does not name {outside[0]}, which {lora.start} adapts; leave targets out to take "
                "the layers of the LoRA"
            )
    if wrong:
        raise ValueError("\n".join(wrong))
    taken = {**found, "targets": list(lora.targets or map(_whole_name, start.layers))}
    model = recipe.model.model_copy(update={"lora": lora.model_copy(update=taken)})
    return recipe.model_copy(update={"model": model})


def _whole_name(layer: str) -> str:
    """A target that names this layer alone. A layer outside the blocks may be the end of the name of others."""
    return layer if any(part.isdigit() for part in layer.split(".")) else f"^{layer}"


def begin(weights: TrainedWeights, recipe: AnyRecipe) -> None:
    """Put the LoRA of `model.lora.start` into new adapters, if the recipe has one. The reference is then this model.

    Raises:
        ValueError: the LoRA cannot be read, or does not fit the model.
    """
    if recipe.model.lora.start is not None:
        weights.start_from(_start_of(recipe, recipe.model.lora.start))
