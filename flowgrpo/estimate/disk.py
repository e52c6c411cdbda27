"""Estimates of the room that a run needs on its disk; docs/estimates.md explains the method."""

from __future__ import annotations

import math
from pathlib import Path

from ..configs.schema import Recipe
from ..training.model_paths import model_folder
from .memory import averages_of, moments_of
from .models import Model


def on_disk(recipe: Recipe, model: Model, heldout: int) -> dict[str, int]:
    """Bytes of what a run writes, by name, at the moment when each takes most; samples and gallery are not counted.

    Args:
        recipe: of images or videos.
        model: the recipe's pipeline.
        heldout: number of held-out prompts.
    """
    settings, full = recipe.run, recipe.model.train == "full"
    # Weights and their averages in float32, and the two moments of AdamW.
    checkpoint = 4 * model.trained * (1 + averages_of(recipe)) + moments_of(recipe, model.trained)
    written = math.ceil(settings.iterations / settings.checkpoint_every)
    if settings.checkpoint_minutes is not None:
        written = settings.iterations  # as many as there can be
    # The oldest checkpoint is dropped when the new one is complete.
    most = checkpoint * min(written, settings.keep + 1)
    trained = model.denoiser if full else 4 * model.trained
    best = 2 * trained if heldout and recipe.evaluate.results == "best" else 0
    result = model.denoiser + _copied(recipe, model) if full else trained
    return {"checkpoints": most, "best": best, "pipeline" if full else "lora": result}


def _copied(recipe: Recipe, model: Model) -> int:
    """Bytes of the parts of a pipeline that are not trained: they are copied in the dtype of their files."""
    folder = Path(model_folder(recipe.model.path))
    if not folder.is_dir():
        return model.vae + model.encoders + model.image_encoders + model.others
    parts = [path for path in folder.iterdir() if "transformer" not in path.name and not path.name.startswith("unet")]
    return sum(file.stat().st_size for part in parts for file in part.rglob("*") if file.is_file())
