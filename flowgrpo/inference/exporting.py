"""The result of a run, or a checkpoint of a run, as a folder that plain diffusers or transformers loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..configs.schema import Recipe
from ..training.folder.leftovers import RESULTS
from ..weights.saving import new_folder
from .checkpoints import hint_of
from .opening import image_recipe, is_run, open_images
from .text_inference import open_weights, recipe_of, task_of


def result_of(run: Path) -> Path | None:
    """The folder of a finished run's trained weights: `lora`, `pipeline` or `model`; None if there is none."""
    return next((run / name for name in RESULTS if (run / name).is_dir()), None)


def export_weights(model: str, out: Path, *, checkpoint: str | None = None) -> None:
    """Write the trained weights of a run into a new folder, as a finished run writes `lora`, `pipeline` or `model`.

    Args:
        model: a run folder.
        out: the new folder. It appears when it is complete.
        checkpoint: the checkpoint to write, see `find_checkpoint`; None for the result of the finished run.

    Raises:
        ValueError: the model is not a run, the folder exists, or the run has no result or no such checkpoint.
    """
    if not is_run(model):
        raise ValueError(f"{model} is not a run folder (no config.yaml); give one that `flowgrpo train` wrote")
    if out.exists():
        raise ValueError(f"{out} exists; name a new folder with --out")
    run = Path(model)
    recipe = image_recipe(model) if task_of(model) == "images" else recipe_of(model)
    if checkpoint is None:
        found = result_of(run)
        if found is None:
            raise ValueError(f"{run} has no trained weights yet; finish it with `flowgrpo resume {run}`{hint_of(run)}")
        with new_folder(out) as target:
            shutil.copytree(found, target, dirs_exist_ok=True)
    elif not isinstance(recipe, Recipe):
        open_weights(model, recipe, checkpoint=checkpoint).save(out)
    else:
        open_images(model, recipe, checkpoint=checkpoint).weights.save(out)
