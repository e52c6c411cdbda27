"""Pictures that a pipeline is conditioned on, from the prompt files of a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ...configs.prompt_source import prompt_source
from ...configs.schema import Recipe
from ...pipelines.arguments import FURTHER, TEXTS, Parameters, accepts, needs_picture
from ...pipelines.pictures import Picture
from ...weights.pipeline_folders import pipeline_class
from ..data import IMAGE, Data, PromptRow, with_conditions, with_pictures, with_targets
from ..teachers import COLUMN, named
from .images_beside import learned

MOST = 5
"""Most prompts that a message names."""
MASK = "mask_image"
MASKS_READ = 500
"""Most masks of a file that are read before a run. The others are read when their prompts are drawn."""
WHITE = 128
"""The smallest value of a mask that is painted: the pipelines that take masks make them black and white."""


def call_parameters(folder: str, pipeline: str | None = None) -> Parameters | None:
    """Parameters of the call of a pipeline in a folder; None if the pipeline must be loaded to know them.

    A pipeline must be loaded if `folder` is a hub id, or if the pipeline brings its own class. `pipeline` is the class
    that loads it, if it is not the class that the folder names.
    """
    index = Path(folder) / "model_index.json"
    kind: Any = pipeline_class(Path(folder), pipeline) if index.is_file() else None
    return None if kind is None else inspect.signature(kind.__call__).parameters


def take_pictures(data: Data, recipe: Recipe, call: Mapping[str, Any], parameters: Parameters) -> None:
    """Give prompts the pictures and further texts of their files: those that the pipeline's call takes, and targets.

    Args:
        data: of the recipe; its prompts are replaced.
        recipe: names the files.
        call: arguments for all training prompts.
        parameters: of the pipeline's call.

    Raises:
        ValueError: a picture is missing or cannot be read, the pipeline needs a picture and there is none, or pictures
            of different sizes would give the samples different sizes.
    """
    taught = _shown_to_teachers(data.train.rows, recipe, call, parameters)
    data.train.rows = illustrated(data.train.rows, recipe.data.train, call, parameters)
    if recipe.data.heldout:
        shown = {**call, **recipe.evaluate.call}
        data.heldout = illustrated(data.heldout, recipe.data.heldout, shown, parameters)
    if taught:
        data.train.rows = [replace(row, teaching=taught.get(row.id)) for row in data.train.rows]
    penalty = learned(recipe)
    if penalty is not None:
        data.beside = illustrated(data.beside, penalty["source"], call, parameters)
    deciding = [row for row in [*data.train.rows, *data.heldout, *data.beside] if row.pictures and row.size is None]
    sizes = {_deciding(row).size for row in deciding}
    missing = [f"model.call.{name}" for name in ("height", "width") if name in parameters and call.get(name) is None]
    if len(sizes) > 1 and missing:
        raise ValueError(
            f"the pictures of the prompts have {len(sizes)} different sizes, and samples must all have one size; set "
            f"{' and '.join(missing)}"
        )
    if not any(accepts(parameters, name) for name in ("height", "width")):
        _refuse_other_shapes(deciding)


def _shown_to_teachers(
    rows: Sequence[PromptRow], recipe: Recipe, call: Mapping[str, Any], parameters: Parameters
) -> dict[int, Any]:
    """The pictures that teachers see in place of the prompts' own, by the number of the prompt in its file."""
    source, found = recipe.data.train, {}
    for k, (name, teacher) in enumerate(named(recipe.model.teachers).items()):
        if teacher.image is None:
            continue
        key = f"model.teachers.{k}.image"
        if IMAGE not in parameters:
            raise ValueError(
                f"{key} is {teacher.image}, and the pipeline takes no picture; leave it out and write a template, or "
                f"use a pipeline whose call has `{IMAGE}`"
            )
        if teacher.image == (prompt_source(source).image or IMAGE):
            raise ValueError(
                f"{key} is {teacher.image}, and the model sees the pictures of this column itself; give the teacher's "
                "pictures a column of another name"
            )
        own = [row for row in rows if len(recipe.model.teachers) == 1 or row.columns.get(COLUMN) == name]
        missing = [
            f"model.call.{side}" for side in ("height", "width") if side in parameters and call.get(side) is None
        ]
        if missing and any(row.size is None for row in own):
            raise ValueError(
                f"{key}: without {' and '.join(missing)}, the pictures of the teacher would set the size of its "
                f"states; set {' and '.join(missing)}"
            )
        shown = with_pictures(
            [replace(row, pictures=None) for row in own], str(replace(prompt_source(source), image=teacher.image))
        )
        for row in shown:
            if row.pictures is None:
                raise ValueError(
                    f"{key}: {row.place or source} has no picture in column {teacher.image!r}; give it one"
                )
            _refuse_several(row, parameters, "write one path")
            found[row.id] = row.pictures
    return found


def _refuse_other_shapes(rows: Sequence[PromptRow]) -> None:
    """Refuse pictures of several shapes, for a pipeline that takes the size of its samples from the picture alone.

    Such pipelines scale their picture to an area of their own, so pictures of one shape give samples of one size.
    """
    first: dict[Fraction, PromptRow] = {}
    for row in rows:
        first.setdefault(Fraction(*_deciding(row).size), row)
    if len(first) > 1:
        named = [f"{row.place} ({' × '.join(map(str, _deciding(row).size))} pixels)" for row in first.values()]
        more = f" and {len(named) - MOST} more" if len(named) > MOST else ""
        raise ValueError(
            f"this pipeline takes its size from the picture, and the pictures of the prompts have {len(named)} "
            f"different shapes: {', '.join(named[:MOST])}{more}; samples must all have one size, so bring the "
            "pictures to one size"
        )


def illustrated(
    rows: list[PromptRow], source: str | None, call: Mapping[str, Any], parameters: Parameters
) -> list[PromptRow]:
    """The prompts of a file with their pictures and further texts: those that the pipeline's call takes, and targets.

    Args:
        rows: the prompts.
        source: their file; None for prompts of a command line, which have their pictures already.
        call: arguments for all prompts.
        parameters: of the pipeline's call.

    Raises:
        ValueError: a picture is missing or cannot be read, the pipeline needs a picture and there is none, or it takes
            no picture and the command line names one.
    """
    rows = _with_texts(rows, [name for name in TEXTS if name in parameters])
    further = [name for name in FURTHER if name in parameters]
    if source is not None:
        pictured = with_pictures(rows, source) if IMAGE in parameters else rows
        made = with_targets(with_conditions(pictured, source, further, rows), source, rows)
        if not any(MASK in row.conditions for row in rows):
            _refuse_black_masks(made)
        rows = made
    for name in further:
        needed = needs_picture(parameters, name) and call.get(name) is None
        if needed and not all(name in row.conditions for row in rows):
            file = "write a prompt file with" if source is None else f"give {source}"
            raise ValueError(
                f"the pipeline needs `{name}` for each prompt; {file} a column `{name}` with paths of pictures, or set "
                f"model.call.{name} to one picture for all prompts"
            )
    if IMAGE not in parameters:
        if source is None and any(row.pictures for row in rows):
            raise ValueError("the pipeline takes no picture; leave out --image")
        return rows
    needed = needs_picture(parameters, IMAGE) and call.get(IMAGE) is None
    if needed and not all(row.pictures for row in rows):
        how = (
            "and none is given; name one with --image"
            if source is None
            else f"and {source} names none; give the file a column `{IMAGE}` with paths of pictures"
        )
        raise ValueError(
            f"the pipeline needs a picture for each prompt, {how}, or set model.call.{IMAGE} to one picture for all "
            "prompts"
        )
    several = next((row for row in rows if isinstance(row.pictures, tuple)), None)
    if several is not None:
        _refuse_several(several, parameters, "write one path" if source is not None else "give one --image")
    return rows


def _with_texts(rows: list[PromptRow], names: Sequence[str]) -> list[PromptRow]:
    """The prompts with the texts of these columns, for the arguments of the same names."""
    found = []
    for row in rows:
        texts = {name: row.columns[name] for name in names if row.columns.get(name) is not None}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ValueError(f"{row.place or 'the prompt'}: `{name}` is {text!r:.80}; write a text")
        found.append(replace(row, texts=texts) if texts else row)
    return found


def _refuse_several(row: PromptRow, parameters: Parameters, mend: str) -> None:
    """Refuse a list of pictures for a pipeline that takes a single picture."""
    if isinstance(row.pictures, tuple) and _takes_one(parameters[IMAGE], parameters):
        count = len(row.shown)
        raise ValueError(
            f"{row.place or 'the prompt'}: {count} picture{'s' * (count > 1)} in a list, but this pipeline takes one "
            f"picture; {mend}"
        )


def _refuse_black_masks(rows: Sequence[PromptRow]) -> None:
    """Refuse masks that paint nothing, before a run ends for want of something to generate.

    Of a large file, masks at equal distances are read.
    """
    masks = [row.conditions[MASK] for row in rows if MASK in row.conditions]
    for mask in masks[:: -(-len(masks) // MASKS_READ) or 1]:
        largest = int(np.asarray(mask.read().convert("L")).max())
        if largest < WHITE:
            raise ValueError(
                f"{mask.place}: the mask {mask.path} paints nothing: its largest value is {largest} of 255. In a mask, "
                "white is what is painted; write 255 there, or leave the prompt out"
            )


def _takes_one(parameter: inspect.Parameter, parameters: Parameters) -> bool:
    """Whether the call is known to take a single picture for a prompt.

    A pipeline of videos begins with its picture. A list is one of diffusers' `PipelineImageInput`, and there means a
    picture for each row of a batch. Other pipelines with that annotation may take several pictures.
    """
    from diffusers.image_processor import PipelineImageInput

    words = str(parameter.annotation)
    if "Image.Image" in words and "list" not in words.lower():
        return True
    return "num_frames" in parameters and parameter.annotation in (PipelineImageInput, "PipelineImageInput")


def _deciding(row: PromptRow) -> Picture:
    """The picture that gives the size of the samples where the call does not: the last of several."""
    return row.shown[-1]
