"""The check of a recipe's model: its folder, the arguments of its call, and the prompts that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..configs.schema import MaskedRecipe, Recipe, TextRecipe
from ..pipelines.arguments import Parameters, argument_faults, size_faults, strength_faults
from ..text.diffusion_models import check_block, type_of
from .data import Data, column_names
from .images.conditioning import call_parameters, take_pictures
from .images.images_beside import learned
from .images.prompt_sizes import bucket_faults, take_sizes
from .model_paths import (
    RECOMMENDED,
    call_arguments,
    check_folder,
    check_template,
    language_folder,
    masked_folder,
    model_folder,
    recommended_arguments,
    with_pictures_read,
)
from .prompt_embeddings import met_at_most
from .prompt_lengths import long_prompts
from .recipe_findings import Checked, Fault, hub_note
from .recipe_prompts import shows_pictures
from .teachers import check_model_of_teacher
from .text.checked_prompts import check_with_tokenizer

FOLDERS: dict[str, Callable[[str], str]] = {"images": model_folder, "text": language_folder, "masked": masked_folder}
"""The function that finds the folder of a model, for each task."""
MOST_ENCODED = 50_000
"""Number of prompts that can be encoded before a run without a word."""


def check_model(found: Checked) -> None:
    """Check the model of a recipe, the arguments of its call, and whether prompts fit it; and find its folder."""
    recipe, path = found.recipe, found.recipe.model.path
    if isinstance(recipe, TextRecipe):
        # Before the model, which may be on the hub: then no more is looked at here.
        for number, teacher in enumerate(recipe.model.teachers):
            key = f"model.teachers.{number}.path"
            found.attempt(key, check_model_of_teacher, key, teacher.path, shows_pictures(recipe))
    resolve = FOLDERS[recipe.task]
    found.folder = found.attempt("model.path", resolve, path) or ""
    if not found.folder:
        return
    if not Path(found.folder).is_dir():
        found.findings.append(Fault("unknown", hub_note("model.path", path), "model.path"))
        # A run asks the hub first, which may have another tokenizer by now.
        if isinstance(recipe, TextRecipe) and not found.fetches:
            _lengths(found, recipe, stored=True)
        return
    before = len(found.findings)
    pictures = shows_pictures(recipe)
    chosen = recipe.model.pipeline if isinstance(recipe, Recipe) else None
    place = "model.path" if chosen is None else "model.pipeline"
    found.attempt(place, check_folder, found.folder, recipe.task, pictures, chosen)
    if len(found.findings) > before:
        return
    if isinstance(recipe, Recipe):
        _call(found, recipe)
    elif recipe.model.chat or recipe.model.system is not None or recipe.model.chat_template_kwargs:
        found.attempt("model.chat", check_template, recipe.model, found.folder)
    if isinstance(recipe, TextRecipe):
        _lengths(found, recipe)
    if isinstance(recipe, MaskedRecipe):
        model, kind = recipe.model, found.attempt("model.path", type_of, found.folder)
        found.attempt("model.block", check_block, path, kind, model.block, model.attention)


def _lengths(found: Checked, recipe: TextRecipe, stored: bool = False) -> None:
    """Check the lengths of the prompts of a run of text, and note how many it will leave out."""
    notes = found.attempt("data.train", check_with_tokenizer, recipe, found.data, found.folder, stored)
    found.findings += [Fault("note", note, "generation.long_prompts") for note in notes or ()]


def _call(found: Checked, recipe: Recipe) -> None:
    """Check the arguments of the pipeline's call, the pictures of prompts, and the lengths of prompts."""
    folder, given = found.folder, recipe.model.call
    parameters = call_parameters(folder, recipe.model.pipeline)
    if parameters is None:
        return
    advised = found.attempt("model.path", recommended_arguments, folder)
    if advised is None:
        return
    faults = list(call_faults(Path(folder), parameters, given))
    faults += _changed_call_faults(Path(folder), parameters, recipe.evaluate.call, "evaluate.call.")
    changes = {"reference_call": recipe.model.reference_call}
    changes |= {f"teachers.{k}.call": teacher.call for k, teacher in enumerate(recipe.model.teachers)}
    for key, changed in changes.items():
        faults += argument_faults(parameters, changed, f"model.{key}.", "the pipeline")
        found.attempt(f"model.{key}", with_pictures_read, changed, f"model.{key}.")
    note = f"{Path(folder) / RECOMMENDED}: call."
    faults += argument_faults(parameters, {k: v for k, v in advised.items() if k not in given}, note, "the pipeline")
    found.findings += [Fault("fault", fault, "model.call") for fault in faults]
    if faults:
        return
    call = found.attempt("model.call", call_arguments, folder, given)
    found.attempt("evaluate.call", with_pictures_read, recipe.evaluate.call, "evaluate.call.")
    if call is None or found.data is None:
        return
    data = found.data
    _note_encoded(found, recipe, data)
    found.findings += [Fault("fault", fault, "data.buckets") for fault in bucket_faults(recipe, folder)]
    found.attempt("data.train", take_sizes, data, recipe, folder, call, parameters)
    if recipe.data.buckets and not any(
        {"height", "width"} <= set(column_names(r)) for r in (data.train.rows, data.heldout)
    ):
        text = "data.buckets rounds the sizes of prompts, and no prompt has columns height and width; leave it out"
        found.findings.append(Fault("note", text, "data.buckets"))
    found.attempt("data.train", take_pictures, data, recipe, call, parameters)
    _note_long_prompts(found, recipe, data, call, parameters)


def _note_encoded(found: Checked, recipe: Recipe, data: Data) -> None:
    """Note that very many prompts are encoded before the run."""
    if not recipe.model.release_text_encoders:
        return
    for source, count in (
        (recipe.data.train, met_at_most(recipe, len(data.train.rows)) * max(len(recipe.data.templates), 1)),
        (_beside(recipe), met_at_most(recipe, len(data.beside))),
    ):
        if count > MOST_ENCODED:
            text = (
                f"{count:,} prompts of {source} are encoded before the run starts, and kept, "
                "because model.release_text_encoders is true; write false to encode prompts when they are drawn"
            )
            found.findings.append(Fault("note", text, "model.release_text_encoders"))


def _note_long_prompts(found: Checked, recipe: Recipe, data: Data, call: Any, parameters: Parameters) -> None:
    """Note prompts whose ends are cut off, also among the captions of images beside rollouts."""
    shown = {**call, **recipe.evaluate.call}
    for source, rows, given in (
        (recipe.data.train, data.train.rows, call),
        (recipe.data.heldout, data.heldout, shown),
        (_beside(recipe), data.beside, call),
    ):
        texts = [row.text for row in rows]
        notes = found.attempt("model.path", _long_prompts, found.folder, str(source), texts, given, parameters)
        found.findings += [Fault("note", note, "data.train") for note in notes or ()]


def _beside(recipe: Recipe) -> str | None:
    """The source of the images beside rollouts; None if there are none."""
    penalty = learned(recipe)
    return None if penalty is None else str(penalty["source"])


def _long_prompts(folder: str, source: str, texts: list[str], call: Any, parameters: Parameters) -> list[str]:
    return list(long_prompts(Path(folder), source, texts, call, parameters))


def _changed_call_faults(folder: Path, parameters: Parameters, changes: Any, place: str) -> Iterator[str]:
    """The faults of arguments that stand in the place of some of a call; the others have been checked with the call."""
    yield from argument_faults(parameters, changes, place, "the pipeline")
    if "strength" in changes:
        yield from strength_faults(parameters, changes, place)
    yield from size_faults(folder, changes, place)


def call_faults(folder: Path, parameters: Parameters, call: Any, place: str = "model.call.") -> Iterator[str]:
    """The faults of the arguments of a pipeline's call."""
    yield from argument_faults(parameters, call, place, "the pipeline")
    yield from strength_faults(parameters, {**recommended_arguments(str(folder)), **call}, place)
    yield from size_faults(folder, call, place)
