"""Estimates of the memory of pipelines with which reward `rendered` makes images; see docs/estimates.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..configs.schema import Recipe
from .language import RENDERING, TextEstimate
from .memory import Shares, passing, waiting
from .models import model_of

PIPELINES = "rendering pipelines"


def with_pipelines(found: TextEstimate, recipes: Sequence[Recipe]) -> TextEstimate:
    """The estimate of a run of text, with pipelines that make images of its completions.

    Args:
        found: without them.
        recipes: how each pipeline makes images.

    Raises:
        ValueError: the shapes of a pipeline are unknown.
    """
    if not recipes:
        return found
    sizes = [_sizes(recipe) for recipe in recipes]
    resting, rendering = sum(own for own, _ in sizes), max(most for _, most in sizes)
    return replace(
        found, resting={**found.resting, PIPELINES: resting}, passing={**found.passing, RENDERING: rendering}
    )


def _sizes(recipe: Recipe) -> tuple[int, int]:
    """Bytes of the weights of a pipeline, and the most that it needs beside them while it makes images."""
    model, away = model_of(recipe.model), waiting(recipe)
    parts = {
        "denoiser": model.denoiser, "VAE": model.vae, "text encoders": model.encoders,
        "image encoder": model.image_encoders, "other networks": model.others,
    }  # fmt: skip
    phases = passing(recipe, model, Shares.of(recipe, 1, None), model)
    made = [size for name, size in phases.items() if name in ("sampling", "decoding", "encoding")]
    return sum(size for name, size in parts.items() if name not in away), max(made)
