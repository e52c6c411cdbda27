"""The prompts that a recipe names: how they are read, and their check before a model loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..configs.prompt_source import HUB, prompt_source
from ..configs.schema import AnyRecipe, MaskedRecipe, Recipe, TextRecipe
from ..configs.sections import SPLITS
from ..parts.choice import Choice
from ..parts.traits import offering, saying, trained
from ..pipelines.arguments import FURTHER
from ..rewards.base import NOISE_KEY, OF_GIVEN, OF_RECOVERED, OF_TEXT, RESERVED, SAMPLING_RATE
from ..text.picture_marks import PART, marked
from .data import (
    IMAGE,
    Data,
    PromptRow,
    PromptStream,
    column_names,
    names_with_pictures,
    read_prompts,
    templated,
    with_given,
    with_pictures,
)
from .distributed.processes import Processes
from .images.images_beside import learned, read_beside
from .model_paths import sampling_rate_of_path
from .prompts.chosen_prompts import evaluated_rows
from .prompts.hub_sets import pinned
from .prompts.overlap import said
from .prompts.stored_table import StoredColumns
from .recipe_findings import Checked, Fault

BESIDE = "beside"
IMAGES = "images"
"""How data sets of other tools call the column with a list of pictures."""


def read_heldout(recipe: AnyRecipe) -> list[PromptRow]:
    """The held-out prompts of a recipe that are on this machine; empty if the recipe names none.

    Raises:
        NotFetched: the prompts are a data set of the hub that is not on this machine.
        ValueError: see `read_prompts`.
    """
    return read_split(recipe, "heldout", fetch=False)


def read_split(recipe: AnyRecipe, split: str, fetch: bool = True) -> list[PromptRow]:
    """The prompts of one of `SPLITS`, at most `evaluate.prompts`; empty if the recipe names none."""
    source = recipe.data.source(split)
    return pictured(recipe, evaluated_rows(read_prompts(source, fetch), recipe.evaluate), source) if source else []


def shows_pictures(recipe: AnyRecipe) -> bool:
    """Whether a language model is shown the pictures of its prompts."""
    return isinstance(recipe, TextRecipe) and recipe.model.pictures


def pictured(recipe: AnyRecipe, rows: list[PromptRow], source: str) -> list[PromptRow]:
    """The prompts of a file with their pictures, if the recipe shows them to a language model.

    Raises:
        ValueError: the recipe shows pictures and the file has none, or a picture is missing or cannot be read.
    """
    if not shows_pictures(recipe):
        for row in rows:
            if row.messages is not None and any(PART in message["content"] for message in row.messages):
                what = ", or write model.pictures: true for a model that sees" if isinstance(recipe, TextRecipe) else ""
                raise ValueError(
                    f"{row.place}: a message holds image, and a language model reads text; leave it out{what}"
                )
        return rows
    key, templates = picture_column(rows, source), recipe.data.templates if source == recipe.data.train else []
    if key != IMAGE and prompt_source(source).image is None:
        source = str(replace(prompt_source(source), image=key))
    found = with_pictures(rows, source)
    if any(row.pictures is None for row in found):
        stored = rows[0].columns if rows else None
        tables = stored.table.pictures if isinstance(stored, StoredColumns) else ()
        named = f", or name one of its columns of pictures, as in {source}?image={tables[0]}" if tables else ""
        raise ValueError(
            f"{source}: the prompts have no column `{IMAGE}`, and model.pictures is true; give each prompt the path of "
            f"its picture, or a list of paths, in a column `{IMAGE}`{named}"
        )
    for row in found:
        for asked in (row, *(templated(row, template) for template in templates)):
            talk = [asked.text] if asked.messages is None else [one["content"] for one in asked.messages]
            try:
                marked(talk, len(row.shown))
            except ValueError as error:
                raise ValueError(f"{row.place or source}: {error}") from None
    # Rewards get the paths as `image`, and no column may be called as what they get anyway.
    kept = [{name: value for name, value in row.columns.items() if name != key or key == IMAGE} for row in found]
    return [replace(row, columns=columns) for row, columns in zip(found, kept)] if key in RESERVED else found


def picture_column(rows: Sequence[PromptRow], source: str) -> str:
    """The column of prompts that has their pictures: what the source names, `image`, or else `images`."""
    named = prompt_source(source).image
    if named is not None or not rows:
        return named or IMAGE
    there = names_with_pictures(rows)
    return IMAGES if IMAGES in there and IMAGE not in there else IMAGE


def given_columns(recipe: AnyRecipe) -> Sequence[str]:
    """The columns of the training prompts that hold what stands in the place of samples; empty if a recipe samples."""
    chosen = recipe.rollout.form if isinstance(recipe, TextRecipe) else recipe.sampler.plan
    columns: Sequence[str] = chosen.get("columns") or ("chosen", "rejected")
    return columns if offering(chosen, "given") else ()


def kind_of_run(recipe: AnyRecipe, fetch: bool = False) -> str:
    """What a run samples: `images`, `sounds` or `completions`.

    Args:
        recipe: the recipe.
        fetch: see `sampling_rate_of_path`.
    """
    if not isinstance(recipe, Recipe):
        return "completions"
    return "images" if sampling_rate_of_path(recipe.model.path, fetch) is None else "sounds"


def columns_of_run(recipe: AnyRecipe, evaluation: bool = False) -> tuple[str, ...]:
    """The names of the columns that a run, or its evaluation, gives to rewards, see `Collected.given`."""
    # An evaluation samples.
    own = OF_GIVEN if given_columns(recipe) and not evaluation else ()
    if isinstance(recipe, MaskedRecipe):
        return (*own, NOISE_KEY)
    if not isinstance(recipe, TextRecipe):
        return (*own, SAMPLING_RATE) if kind_of_run(recipe) == "sounds" else own
    return (*OF_TEXT, *own) if recipe.parts is None else (*OF_TEXT, *own, "parts")


def with_revisions(recipe: AnyRecipe, processes: Processes) -> AnyRecipe:
    """The recipe with the commits of its data sets of the hub, so that the run reads the same prompts when it goes on.

    All processes get the commits of the first process. A data set that cannot be found stays as it is, since the check
    of the recipe says what is wrong.
    """
    penalty = learned(recipe) if isinstance(recipe, Recipe) else None
    texts = {split: getattr(recipe.data, split) for split in SPLITS}
    texts |= {} if penalty is None else {BESIDE: penalty["source"]}
    found = {}
    for name, text in texts.items():
        if text is not None and text.startswith(HUB):
            found[name] = text
            with suppress(ValueError):
                found[name] = str(pinned(prompt_source(text)))
    if not found:
        return recipe
    known = processes.gather(found)[0]
    changed: dict[str, Any] = {}
    if penalty is not None and BESIDE in known:
        kept = replace(penalty, options={**penalty.options, "source": known.pop(BESIDE)})
        changed["penalties"] = [kept if one is penalty else one for one in recipe.penalties]
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=known), **changed})


def check_data(found: Checked) -> Data | None:
    """The training and held-out prompts of a recipe, without their pictures; None if they cannot be read."""
    recipe, rows = found.recipe, {}
    for name in ("train", "heldout"):
        source = getattr(recipe.data, name)
        if source is not None:
            rows[name] = found.attempt(f"data.{name}", sound_prompts, recipe, source, found.fetches)
    train = rows["train"]
    if train is not None:
        found.attempt("rollout.prompts", _enough, recipe, train)
        if isinstance(recipe, Recipe) and (columns := given_columns(recipe)):
            train = found.attempt("sampler.plan.columns", with_given, train, recipe.data.train, columns)
        for choice in saying(recipe, "prompt_check") if train is not None else ():
            target: Any = choice.target
            found.attempt(choice.kind, target.prompt_check, choice, train)
    if recipe.data.heldout is None and "heldout" not in recipe.data.model_fields_set:
        text = (
            "the recipe names a model and training prompts of its own, and no held-out prompts, so nothing is "
            "evaluated; name a file with data.heldout, or write data.heldout: null"
        )
        found.findings.append(Fault("note", text, "data.heldout"))
    if isinstance(recipe, Recipe) and (penalty := learned(recipe)) is not None:
        rows["beside"] = found.attempt(f"penalties.{penalty.short}", _beside, penalty, found.fetches)
    if train is None or None in rows.values():
        return None
    heldout = evaluated_rows(rows.get("heldout", []), recipe.evaluate)
    return Data(PromptStream(train, recipe.run.seed), heldout, rows.get("beside", []))


def _beside(penalty: Choice, fetch: bool) -> list[PromptRow]:
    rows = read_beside(penalty, fetch)
    refuse_conversations(rows)
    return rows


def sound_prompts(recipe: AnyRecipe, source: str, fetch: bool) -> list[PromptRow]:
    """Read prompts, and check that a recipe can use each prompt and each column; see `read_prompts`.

    Raises:
        ValueError: the file cannot be read, has a column with a reserved name, or has prompts of another task.
    """
    rows = read_prompts(source, fetch)
    columns = column_names(rows, columns_of_run(recipe))
    own = picture_column(rows, source) if shows_pictures(recipe) else None
    reserved = [name for name in RESERVED if name in columns and name != own]
    if given_columns(recipe):
        read = set(column_names(rows))
        reserved += [name for name in OF_GIVEN if name in read]
    if isinstance(recipe, Recipe) and trained(recipe) == "recovered":
        reserved += [name for name in OF_RECOVERED if name in columns]
    if reserved:
        raise ValueError(
            f"{source}: the prompts have a column {reserved[0]!r}, which rewards receive anyway; rename it"
        )
    if isinstance(recipe, Recipe):
        refuse_conversations(rows)
    return pictured(recipe, rows, source)


def refuse_conversations(rows: Sequence[PromptRow]) -> None:
    """Refuse prompts that are conversations, because pipelines take texts."""
    for row in rows:
        if row.messages is not None:
            raise ValueError(
                f"{row.place}: prompt {row.id + 1} is a conversation ({row.text!r:.80}), which only "
                "language models read; write its words as `prompt`"
            )


def _enough(recipe: AnyRecipe, train: Sequence[PromptRow]) -> None:
    if recipe.rollout.prompts > len(train):
        raise ValueError(
            f"rollout.prompts is {recipe.rollout.prompts} but {recipe.data.train} holds {len(train)} prompts; use at "
            f"most {len(train)} or a longer file"
        )


def note_shared_prompts(found: Checked, rows: Sequence[PromptRow], source: str, split: str) -> None:
    """Note held-out prompts that are training prompts too, or test prompts that are training or held-out prompts.

    Args:
        found: gets the notes.
        rows: the prompts of the split.
        source: their file.
        split: `heldout` or `test`.
    """
    data = found.data
    if data is None:
        return
    what, shows = {"heldout": "held-out", "test": "test"}[split], shows_pictures(found.recipe)
    compared = {"train": data.train.rows} | ({"heldout": data.heldout} if split == "test" else {})
    for name, others in compared.items():
        other = found.recipe.data.source(name)
        if len(others) == found.recipe.evaluate.prompts and other:
            others = read_prompts(other, found.fetches)  # not only those of the evaluations
            if any(row.pictures is not None for row in rows):
                others = pictured(found.recipe, others, other) if shows else with_pictures(others, other)
        known = {said(row) for row in others}
        count = sum(said(row) in known for row in rows)
        if count:
            text = (
                f"{count} of {len(rows)} prompts of {source}, the {what} prompts, are in data.{name} ({other}) too; "
                f"take them out of one of the two, or name another file with data.{split}"
            )
            found.findings.append(Fault("note", text, f"data.{split}"))


def note_oddities(found: Checked, source: str, rows: Sequence[PromptRow]) -> None:
    """Note prompts that stand several times in their file, and lines of JSON that a .txt file gives as they are.

    Args:
        found: gets the notes.
        source: the file.
        rows: its prompts.
    """
    words = [said(row) for row in rows]
    counts = Counter(words)
    if len(counts) < len(rows):
        # With other columns, such as another answer or another picture, a prompt is another task.
        alike = [row for row, text in zip(rows, words) if counts[text] > 1]
        tasks = Counter((said(row), row.size, row.given, tuple(map(repr, row.columns.values()))) for row in alike)
        if repeated := len(alike) - len(tasks):
            text = f"{repeated:,} of {len(rows):,} prompts of {source} are there already, with the same columns"
            found.findings.append(Fault("note", text, "data.train"))
    objects = [row for row in rows if row.text.startswith("{") and row.text.endswith("}")]
    if source.lower().endswith(".txt") and objects:
        text = (
            f"{source}: {len(objects):,} of {len(rows):,} prompts look like JSON, and a .txt file has a prompt a line; "
            "name a file of objects .jsonl"
        )
        found.findings.append(Fault("note", text, "data.train"))


def note_left_out(found: Checked, source: str, rows: Sequence[PromptRow], takes_pictures: bool | None) -> None:
    """Note the columns of a table that the run leaves out.

    Args:
        found: gets the note.
        source: the prompts.
        rows: its rows.
        takes_pictures: whether the pipeline takes pictures; None if that is not known.
    """
    columns = rows[0].columns if rows else None
    if not isinstance(columns, StoredColumns):
        return
    used = {prompt_source(source).image or IMAGE, *FURTHER} if takes_pictures is not False else set()
    used |= set(given_columns(found.recipe))
    pictures = [name for name in columns.table.pictures if name not in used]
    for names, what in ((pictures, "pictures, sounds or bytes"), (columns.table.left_out, "times or other values")):
        if names:
            listed = ", ".join(names)
            text = f"{source} has columns of {what}, which rewards do not get: {listed[:300]}"
            found.findings.append(Fault("note", text, "data.train"))
