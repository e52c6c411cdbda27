"""The learning rate over a run."""

from __future__ import annotations

import math

from ..configs.schema import AnyRecipe


def learning_rate(recipe: AnyRecipe, taken: int) -> float:
    """Of the optimizer step after `taken` ones: a linear warm-up, then the schedule's fall over the rest of the run."""
    settings = recipe.optimizer
    if taken < settings.warmup:
        return settings.learning_rate * (taken + 1) / settings.warmup
    falling = recipe.run.iterations * settings.epochs * settings.updates - settings.warmup
    done = min((taken - settings.warmup) / max(falling, 1), 1.0)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[settings.schedule]
    return settings.learning_rate * share
