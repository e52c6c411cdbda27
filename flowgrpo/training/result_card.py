"""Writes the model card of a result from what is known of its run."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..configs.run_recipes import measured_alike_since, recipes_of
from ..configs.schema import AnyRecipe, MaskedRecipe, Recipe, TextRecipe
from ..configs.yaml_text import read_text
from ..intake.json_text import lines_of, parse_json
from ..pipelines.arguments import FURTHER, PICTURES
from ..text.diffusion_models import DIFFUSION_TYPES, type_of
from ..weights.saving import left_out
from .data import IMAGE, PromptRow, have_pictures
from .folder.changing import may_change
from .folder.model_card import CardFacts, card_text, write_card
from .folder.resuming import changes
from .folder.run_folder import RunFolder
from .images.conditioning import call_parameters
from .model_paths import model_folder, recommended_arguments
from .recipe_prompts import shows_pictures

_LONGEST = 60
"""Characters of a change in a card."""


@dataclass(frozen=True)
class Known:
    """What a run knows while its model and its prompts are loaded.

    Attributes:
        train, heldout: prompts; None if they are not read.
        pipe: the model; None if it is not loaded.
    """

    train: Sequence[PromptRow] | None = None
    heldout: Sequence[PromptRow] | None = None
    pipe: Any = None


def write_result_card(
    folder: Path, kind: str, recipe: AnyRecipe, run: RunFolder, iteration: int, known: Known, former: str | None = None
) -> None:
    """Write the card of a result into its folder.

    Args:
        folder: of the result.
        kind: `lora`, `pipeline` or `model`.
        recipe: of the run.
        run: its folder, for scores.
        iteration: iterations after which the weights were taken.
        known: what is loaded.
        former: a card that a person had changed, which is kept beside the new one.
    """
    first = _first_sample(run)
    facts = CardFacts(
        kind=kind,
        iteration=iteration,
        place=str(folder.resolve()),
        train=None if known.train is None else len(known.train),
        heldout=None if known.heldout is None else len(known.heldout),
        loads_lora=known.pipe is None or hasattr(type(known.pipe), "load_lora_weights"),
        files=tuple(sorted(file.name for file in folder.iterdir())),
        call=_call(recipe),
        left_out=tuple(_left_out(folder, kind, recipe, known.pipe)),
        video="frames" in first,
        sampling_rate=first.get("sampling_rate"),
        pictures=_pictures(recipe, known),
        chat=_chats(folder, recipe, known.pipe),
        alike_since=measured_alike_since(run.path, iteration),
        changed=tuple(_changed(run, recipe, iteration)),
        own_class=isinstance(recipe, MaskedRecipe) and _has_own_class(folder, recipe, known.pipe),
    )
    write_card(folder, card_text(recipe, run.read_metrics(), facts), former)


def _changed(run: RunFolder, recipe: AnyRecipe, iteration: int) -> Iterator[str]:
    """What was changed in the middle of the run, by hand, of what a run may not change; see `folder.changing`."""
    for (_, before), (start, now) in pairwise(recipes_of(run.path)):
        if start >= iteration:
            return
        with suppress(OSError, ValueError):
            found = changes(before, read_text(now)).items()
            told = [_told(key, values) for key, values in found if not may_change(key, recipe)]
            if told:
                yield f"after {start} iterations {', '.join(told)}"


def _told(key: str, values: str) -> str:
    """A change in words; values that are long, or that may hold a path, are left out."""
    return key if len(values) > _LONGEST or set(values) & set("/\\") else f"{key} {values}"


def _call(recipe: AnyRecipe) -> dict[str, Any]:
    if not isinstance(recipe, Recipe):
        return {}
    recommended: dict[str, Any] = {}
    with suppress(ValueError, OSError):
        recommended = recommended_arguments(model_folder(recipe.model.path))
    return {**recommended, **recipe.as_evaluated.model.call}


def _pictures(recipe: AnyRecipe, known: Known) -> tuple[str, ...]:
    """The arguments that are pictures when a sample is made: of its prompt, or of the call for all prompts."""
    if not isinstance(recipe, Recipe):
        return (IMAGE,) if shows_pictures(recipe) else ()
    rows, source = (known.train, recipe.data.train) if known.train else (known.heldout, recipe.data.heldout)
    of_prompts = {name for row in rows or () for name in FURTHER if name in row.conditions or row.columns.get(name)}
    if rows and source is not None and have_pictures(rows, source):
        of_prompts.add(IMAGE)
    takes: Container[str] = ()
    if of_prompts:
        # A pipeline that takes no picture leaves the column to rewards.
        if known.pipe is not None:
            takes = inspect.signature(type(known.pipe).__call__).parameters
        else:
            with suppress(ValueError, OSError):
                takes = call_parameters(model_folder(recipe.model.path), recipe.model.pipeline) or ()
    given = recipe.as_evaluated.model.call
    return tuple(name for name in PICTURES if given.get(name) is not None or (name in of_prompts and name in takes))


def _left_out(folder: Path, kind: str, recipe: AnyRecipe, pipe: Any) -> Iterator[str]:
    """Components that `from_pretrained` is to be given as None: what is left out and not optional for the class."""
    if isinstance(recipe, Recipe):
        optional = getattr(type(pipe), "_optional_components", ())
        with suppress(ValueError, OSError):
            found = left_out(str(folder) if kind == "pipeline" else model_folder(recipe.model.path))
            yield from (name for name in found if name not in optional)


def _first_sample(run: RunFolder) -> dict[str, Any]:
    """What the index of a run says of its first sample; empty if there is none."""
    with suppress(ValueError, OSError):
        first = parse_json(next(lines_of(run.index), "null"))
        return first if isinstance(first, dict) else {}
    return {}


def _chats(folder: Path, recipe: AnyRecipe, language: Any) -> bool:
    """Whether prompts go through a chat template."""
    if not isinstance(recipe, TextRecipe):
        return False
    if language is not None:
        return bool(language.chat)
    if recipe.model.chat is not None:
        return recipe.model.chat
    config = folder / "tokenizer_config.json"
    held = config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8", errors="replace")
    return held or (folder / "chat_template.jinja").is_file()


def _has_own_class(folder: Path, recipe: MaskedRecipe, language: Any) -> bool:
    """Whether the class of a masked language model is here, and not in transformers."""
    if language is not None:
        return bool(language.model.config.model_type in DIFFUSION_TYPES)
    for place in (str(folder), recipe.model.path):
        with suppress(ValueError, OSError):
            if type_of(place, local=True) is not None:
                return True
    return False
