"""The result of a run, or a checkpoint of a run, as a folder that plain diffusers or transformers loads."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..configs.schema import AnyRecipe, Recipe
from ..intake.run_folders import no_run
from ..training.data import PromptRow, read_prompts
from ..training.folder.leftovers import RESULTS
from ..training.folder.model_card import CARD, move_card
from ..training.folder.run_folder import RunFolder
from ..training.prompts.chosen_prompts import evaluated_rows
from ..training.result_card import Known, write_result_card
from ..weights.pipeline_folders import safetensors_faults
from ..weights.saving import new_folder
from .checkpoints import find_checkpoint, hint_of, iterations_of
from .model_recipes import image_recipe, is_run, with_share
from .opening import open_images
from .text_inference import open_weights, recipe_of, task_of


def result_of(run: Path) -> Path | None:
    """The folder of a finished run's trained weights: `lora`, `pipeline` or `model`; None if there is none."""
    return next((run / name for name in RESULTS if (run / name).is_dir()), None)


def export_weights(model: str, out: Path, *, checkpoint: str | None = None, merge: bool = False) -> None:
    """Write the trained weights of a run into a new folder, as a finished run writes `lora`, `pipeline` or `model`.

    Args:
        model: a run folder.
        out: the new folder. It appears when it is complete.
        checkpoint: the checkpoint to write, see `find_checkpoint`; None for the result of the finished run.
        merge: for a LoRA, write the whole model with the LoRA added into its weights. They are in the type of
            `model.dtype`, and not quantised.

    Raises:
        ValueError: the model is not a run, `merge` is set and the run trained no LoRA, the folder exists, a file of the
            result is damaged, or the run has no result or no such checkpoint.
    """
    if not is_run(model):
        raise ValueError(no_run(model))
    if out.exists():
        raise ValueError(f"{out} exists; name a new folder with --out")
    run = Path(model)
    recipe = any_recipe(model)
    if merge and recipe.model.train != "lora":
        raise ValueError(f"{run} has trained all weights, so there is no LoRA to merge; leave --merge out")
    found = result_of(run)
    if checkpoint is None and found is None:
        raise ValueError(f"{run} has no trained weights yet; finish it with `flowgrpo resume {run}`{hint_of(run)}")
    if checkpoint is None and found is not None and not merge:
        for file in sorted(found.rglob("*.safetensors")):
            for fault in safetensors_faults(file):
                raise ValueError(f"{fault}{hint_of(run)}")
        with new_folder(out) as target:
            shutil.copytree(found, target, dirs_exist_ok=True)
            add_card(target, recipe, run, iterations_of(run, recipe.evaluate.results, recipe.run.iterations))
            move_card(target, out)
        return
    if checkpoint is None:
        number = iterations_of(run, recipe.evaluate.results, recipe.run.iterations)
    else:
        number = int(find_checkpoint(model, checkpoint).name.removeprefix("iter-"))
    source: str | None = None
    if merge:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantize": None})})
    if not isinstance(recipe, Recipe):
        weights: Any = open_weights(model, recipe, checkpoint=checkpoint)
    else:
        opened = open_images(model, with_share(recipe, 1.0), checkpoint=checkpoint)
        weights, source = opened.weights, opened.folder
    if merge:
        weights.merge(source)
    weights.save(out)
    add_card(out, recipe, run, number, weights.pipe, merged=merge)


def any_recipe(model: str) -> AnyRecipe:
    """The recipe of a run, whatever it makes."""
    return image_recipe(model) if task_of(model) == "images" else recipe_of(model)


def add_card(
    folder: Path, recipe: AnyRecipe, run: Path, iteration: int, pipe: Any = None, merged: bool = False
) -> None:
    """Write the model card of a folder of weights, if it has none yet.

    Args:
        folder: the weights.
        recipe: of the run.
        run: its folder.
        iteration: iterations after which the weights were taken.
        pipe: the loaded model; None if it is not loaded.
        merged: whether a LoRA was added into the weights.
    """
    if (folder / CARD).exists():
        return
    whole = "pipeline" if isinstance(recipe, Recipe) else "model"
    kind = "lora" if recipe.model.train == "lora" and not merged else whole
    heldout = None if recipe.data.heldout is None else _rows(recipe.data.heldout)
    known = Known(_rows(recipe.data.train), heldout and evaluated_rows(heldout, recipe.evaluate), pipe)
    write_result_card(folder, kind, recipe, RunFolder(run), iteration, known)


def _rows(source: str) -> list[PromptRow] | None:
    """The prompts of a file; None if it cannot be read any more."""
    with suppress(ValueError, OSError):
        return read_prompts(source)
    return None
