"""The prompts that a recipe names: how they are read, and their check before a model loads."""

from __future__ import annotations

from collections.abc import Sequence

from ..configs.schema import AnyRecipe, TextRecipe
from ..rewards.base import RESERVED
from ..text.cutting import Parts
from .data import Data, PromptRow, PromptStream, columns_of, read_prompts
from .recipe_findings import Checked, Fault


def read_heldout(recipe: AnyRecipe) -> list[PromptRow]:
    """The held-out prompts of a recipe, at most `evaluate.prompts`; empty if the recipe names no file."""
    return read_split(recipe, "heldout")


def read_split(recipe: AnyRecipe, split: str) -> list[PromptRow]:
    """The prompts of one of `SPLITS`, at most `evaluate.prompts`; empty if the recipe names no file."""
    source = recipe.data.source(split)
    return read_prompts(source)[: recipe.evaluate.prompts] if source else []


def parts_of(recipe: AnyRecipe) -> Parts | None:
    """Parts without an entry, for `columns_of`, if the recipe cuts completions into parts; else None."""
    return Parts([], []) if isinstance(recipe, TextRecipe) and recipe.parts is not None else None


def check_data(found: Checked) -> Data | None:
    """The training and held-out prompts of a recipe, without their pictures; None if they cannot be read."""
    recipe, rows = found.recipe, {}
    for name in ("train", "heldout"):
        source = getattr(recipe.data, name)
        if source is not None:
            rows[name] = found.attempt(f"data.{name}", sound_prompts, recipe, source)
    train = rows["train"]
    if train is not None:
        found.attempt("rollout.prompts", _enough, recipe, train)
    if None in rows.values():
        return None
    return Data(PromptStream(train, recipe.run.seed), rows.get("heldout", [])[: recipe.evaluate.prompts])


def sound_prompts(recipe: AnyRecipe, source: str) -> list[PromptRow]:
    """Read a prompt file, and check that a recipe can use each prompt and each column.

    Raises:
        ValueError: the file cannot be read, has a column with a reserved name, or has prompts of another task.
    """
    rows = read_prompts(source)
    reserved = [name for name in RESERVED if any(name in row.columns for row in rows)]
    if reserved:
        raise ValueError(
            f"{source}: the prompts have a column {reserved[0]!r}, which rewards receive anyway; rename it"
        )
    if not isinstance(recipe, TextRecipe):
        refuse_conversations(rows)
    elif recipe.parts is not None:
        columns_of(rows, Parts([], []))
    return rows


def refuse_conversations(rows: Sequence[PromptRow]) -> None:
    """Refuse prompts that are conversations, because pipelines and masked models take texts."""
    for row in rows:
        if row.messages is not None:
            raise ValueError(
                f"{row.place}: prompt {row.id + 1} is a conversation ({row.text!r:.80}), which only causal "
                "language models read; write its words as `prompt`"
            )


def _enough(recipe: AnyRecipe, train: Sequence[PromptRow]) -> None:
    if recipe.rollout.prompts > len(train):
        raise ValueError(
            f"rollout.prompts is {recipe.rollout.prompts} but {recipe.data.train} holds {len(train)} prompts; use at "
            f"most {len(train)} or a longer file"
        )


def note_shared_prompts(found: Checked, rows: Sequence[PromptRow], source: str) -> None:
    """Note test prompts that are training or held-out prompts too."""
    for name in ("train", "heldout"):
        other = found.recipe.data.source(name)
        known = {_said(row) for row in read_prompts(other)} if other else set()
        count = sum(_said(row) in known for row in rows)
        if count:
            text = (
                f"{count} of {len(rows)} prompts of {source}, the test prompts, are in data.{name} ({other}) too; take "
                "them out of one of the two, or name another file with data.test"
            )
            found.findings.append(Fault("note", text, "data.test"))


def _said(row: PromptRow) -> str:
    """The words of a prompt or a conversation; texts that differ in spaces alone have equal words."""
    said = [row.text] if row.messages is None else [f"{m['role']}: {m['content']}" for m in row.messages]
    return " ".join(" ".join(said).split())
