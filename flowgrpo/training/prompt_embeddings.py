"""Which prompts of a run of images are encoded before it starts, and of how many the embeddings are kept."""

from __future__ import annotations

from collections.abc import Sequence

from ..configs.schema import Recipe
from ..core.addressing import address
from .data import Data, PromptRow, templated
from .extensions.extension import has_hook
from .images.images_beside import drawn, learned
from .recipe_rounds import is_uneven
from .teachers import checked_on, contexts_of, know_more

SPARE_EMBEDDINGS = 64 * 2**20
"""Bytes of prompt embeddings that are on the accelerator; others wait in host memory.

So many bytes are also kept beyond `kept_prompts`. They hold a dozen prompts of a large model, or all prompts of the
embedded model."""


def kept_prompts(recipe: Recipe, heldout: int) -> int | None:
    """The number of prompts whose embeddings are kept; None keeps all.

    Embeddings are megabytes each, and prompt files have many thousands of prompts. The number is enough for two
    iterations and an evaluation, so that none of them encodes a prompt twice.
    """
    if recipe.model.release_text_encoders or recipe.critic is not None:
        return None
    beside = (learned(recipe) is not None) + know_more(recipe.model)
    return 2 * recipe.rollout.prompts * (max(len(recipe.data.templates), 1) + beside) + heldout + 1


def met_at_most(recipe: Recipe, train: int) -> int:
    """The largest number of training prompts that a run can meet; `train` is the number in its file."""
    if any(has_hook(choice, "prompts_drawn") for choice in recipe.extensions):
        return train
    return min(train, recipe.run.iterations * recipe.rollout.prompts)


def met_beside(recipe: Recipe, rows: Sequence[PromptRow]) -> list[PromptRow]:
    """The prompts of the images beside rollouts that a run can draw."""
    count = recipe.run.iterations * recipe.rollout.prompts
    if is_uneven(recipe):
        # Each round draws for itself, and how many rounds there are is known only then.
        return list(rows)
    keys = (address(recipe.run.seed, 1, number) for number in range(count))
    return list({row.id: row for row in drawn(rows, keys)}.values()) if rows else []


def met_prompts(recipe: Recipe, data: Data) -> list[PromptRow]:
    """The prompts that a run of images meets: of a long prompt file, only those that its iterations draw.

    What teachers read of these prompts is among them.
    The prompts on which the replay is checked are always among them.
    """
    rows, most = data.train.rows, met_at_most(recipe, len(data.train.rows))
    if most < len(rows):
        rows = list({row.id: row for row in (*checked_on(recipe.model, rows), *data.train.take(0, most))}.values())
    asked = [templated(row, template) for template in recipe.data.templates for row in rows]
    taught = contexts_of(recipe.model, [*rows, *asked])
    return [*rows, *data.heldout, *asked, *taught, *met_beside(recipe, data.beside)]
