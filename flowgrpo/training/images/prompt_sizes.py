"""Sizes of images that prompt files give in their columns `height` and `width`; numbers of frames are of the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...configs.schema import Recipe
from ...pipelines.arguments import Parameters, accepts, size_faults
from ..data import Data, PromptRow, values_of
from ..model_paths import call_arguments, recommended_arguments
from ..prompts.prompt_rows import Size
from ..recipe_findings import Checked, Fault
from .conditioning import call_parameters, illustrated

SIDES = ("height", "width")
FRAMES = "num_frames"
LONGEST = 2**16
"""Most pixels of a side. A larger number is a mistake, or no size."""
MOST = 5
"""Most faults of a prompt file that a message names."""


def take_sizes(data: Data, recipe: Recipe, folder: str, call: Mapping[str, Any], parameters: Parameters) -> None:
    """Give prompts the sizes of their files, if the pipeline's call takes a height and a width.

    Args:
        data: of the recipe; its prompts are replaced.
        recipe: has the sizes to which the sizes of prompts are rounded.
        folder: of the pipeline, which says what sizes it makes; a hub id says nothing.
        call: arguments for all training prompts.
        parameters: of the pipeline's call.

    Raises:
        ValueError: a size is none, or the pipeline cannot make it; the message names file and line. Or training prompts
            have sizes, and the recipe has a part that takes one size only.
    """
    data.train.rows = sized(data.train.rows, recipe, folder, call, parameters)
    data.heldout = sized(data.heldout, recipe, folder, {**call, **recipe.evaluate.call}, parameters)
    if any(row.size is not None for row in data.train.rows) and (faults := list(_refused(recipe))):
        raise ValueError("\n".join(faults))


def _refused(recipe: Recipe) -> Iterator[str]:
    """What cannot be trained on prompts of several sizes."""
    why = "the training prompts have columns height and width"
    mend = "or leave the columns out"
    if recipe.critic is not None:
        yield f"{why}, and a critic reads latents of one size; take critic out, {mend}"
    if recipe.optimizer.cut == "edges":
        yield f"{why}, and optimizer.cut edges deals out batches of all sizes; use optimizer.cut prompts, {mend}"
    if recipe.credit.name != "leaf":
        yield f"{why}, and credit {recipe.credit.short} reads one rollout of all prompts; use credit leaf, {mend}"


def sized(
    rows: list[PromptRow], recipe: Recipe, folder: str, call: Mapping[str, Any], parameters: Parameters
) -> list[PromptRow]:
    """The prompts with their sizes; see `take_sizes`."""
    if any(row.size is not None for row in rows):
        return rows
    sides = [values_of(rows, name) for name in SIDES]
    first = next((row for row, *own in zip(rows, *sides) if any(value not in (None, "") for value in own)), None)
    if first is None:
        return rows
    if not set(SIDES) <= set(parameters):
        if all(accepts(parameters, name) for name in SIDES):
            return rows
        raise ValueError(
            f"{first.place}: the prompts have columns `height` and `width`, and the pipeline's call takes no height "
            "and width; leave the columns out, or rename them if they mean something else"
        )
    buckets, faults, known = recipe.data.buckets, list[str](), dict[Size, str | None]()
    own = tuple(call.get(name) for name in SIDES)
    found: list[PromptRow] = []
    for row, height, width in zip(rows, *sides):
        size, fault = _size_in(row, height, width)
        if size is not None and buckets:
            size = nearest(size, buckets)
        if size is not None and size not in known:
            known[size] = next(size_faults(Path(folder), dict(zip(SIDES, size)), ""), None)
        fault = fault or (None if size is None or known[size] is None else f"{row.place}: {known[size]}")
        if fault is not None:
            faults.append(fault)
        found.append(row if size in (None, own) else replace(row, size=size))
    if faults:
        more = f"\n{len(faults) - MOST:,} more prompts have sizes that cannot be used" if len(faults) > MOST else ""
        raise ValueError("\n".join(faults[:MOST]) + more)
    return found


def with_own_call(rows: list[PromptRow], source: str, recipe: Recipe, folder: str) -> list[PromptRow]:
    """Further prompts with their sizes and pictures, checked like the prompts of a run.

    Args:
        rows: the prompts.
        source: their file.
        recipe: its arguments of the call are sound.
        folder: of the pipeline.

    Raises:
        ValueError: see `sized` and `illustrated`.
    """
    parameters, call = call_parameters(folder, recipe.model.pipeline), call_arguments(folder, recipe.model.call)
    if parameters is None:
        return rows
    return illustrated(sized(rows, recipe, folder, call, parameters), source, call, parameters)


def _size_in(row: PromptRow, height: Any, width: Any) -> tuple[Size | None, str | None]:
    """The size that a prompt asks for, if it asks for one; else a fault, if there is one."""
    sides: list[Any] = [None if value == "" else value for value in (height, width)]
    if sides == [None, None]:
        return None, None
    for name, value in zip(SIDES, sides):
        if value is None:
            other = SIDES[1 - SIDES.index(name)]
            return None, f"{row.place}: it has a {other} and no {name}; give both, or none of them"
        # Tables of text have nothing but text.
        text = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= len(str(LONGEST))
        whole = int(value) if text else value
        if isinstance(whole, bool) or not isinstance(whole, int) or not 1 <= whole <= LONGEST:
            what = f"a number of pixels, a whole number from 1 to {LONGEST}"
            return None, f"{row.place}: `{name}` is {str(value) if text else repr(value):.40}; give {what}"
    return (int(sides[0]), int(sides[1])), None


def note_frames(found: Checked, read: Collection[str]) -> None:
    """Note a column with numbers of frames, because all videos of a run have the same number.

    Args:
        found: gets the note.
        read: names of the columns that rewards read.
    """
    recipe, data = found.recipe, found.data
    if not isinstance(recipe, Recipe) or data is None or found.texts("fault", "needed"):
        return
    call, parameters = recipe.model.call, call_parameters(found.folder, recipe.model.pipeline) or {}
    if FRAMES not in parameters and FRAMES not in call:
        return
    if Path(found.folder).is_dir():
        call = {**recommended_arguments(found.folder), **call}
    default = parameters[FRAMES].default if FRAMES in parameters else None
    made = call.get(FRAMES, default)
    for source, rows in ((recipe.data.train, data.train.rows), (recipe.data.heldout, data.heldout)):
        for name in (FRAMES, "frames"):
            others = [v for v in values_of(rows, name) if v not in (None, "") and str(v) != str(made)]
            if others and name not in read:
                all_have = "the same number of frames" if made is None else f"{made} frames"
                text = (
                    f"{source}: the column `{name}` sets no number of frames; all videos of a run have {all_have}: "
                    f"write model.call.{FRAMES}: {others[0]!s:.20} for another number"
                )
                return found.findings.append(Fault("note", text, f"model.call.{FRAMES}"))


def nearest(size: Size, buckets: Sequence[Size]) -> Size:
    """The bucket with the nearest aspect ratio, of several the one with the nearest area; the first one if all tie."""

    def distance(bucket: Size) -> tuple[float, float]:
        shape = abs(math.log(size[0] / size[1]) - math.log(bucket[0] / bucket[1]))
        return round(shape, 9), abs(math.log(size[0] * size[1]) - math.log(bucket[0] * bucket[1]))

    return min(buckets, key=distance)


def bucket_faults(recipe: Recipe, folder: str) -> Iterator[str]:
    """The faults of `data.buckets`."""
    for k, bucket in enumerate(recipe.data.buckets):
        yield from size_faults(Path(folder), dict(zip(SIDES, bucket)), f"data.buckets.{k}, ")


def size_counts(rows: Sequence[PromptRow]) -> dict[Size | None, int]:
    """Number of prompts of each size, the most frequent first; None for prompts of the size of the call."""
    return dict(Counter(row.size for row in rows).most_common())


def largest(rows: Sequence[PromptRow]) -> Size | None:
    """The size with the most pixels; None if no prompt has a size."""
    found = {row.size for row in rows if row.size is not None}
    return max(found, key=lambda size: (size[0] * size[1], size), default=None)
