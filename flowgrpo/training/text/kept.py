"""Completions as plain data, so that they can be remembered, and put back among others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...text.cutting import Parts
from ...text.sampling import Sampled

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from .text_policy import Completions


def kept_columns(completions: Completions) -> dict[str, list[Any]]:
    """Everything that was written: name -> a value for each of B completions, as plain data.

    The columns are new lists: `ids`, `log_probs`, `ended`, `text` and, if completions are cut, `parts`, the texts and
    the ids of the parts.
    """
    sampled, parts = completions.sampled, completions.parts
    found: dict[str, list[Any]] = {
        "ids": list(sampled.ids),
        "log_probs": list(sampled.log_probs),
        "ended": list(sampled.ended),
        "text": list(completions.samples),
    }
    return found if parts is None else found | {"parts": [list(pair) for pair in zip(parts.texts, parts.ids)]}


def with_columns(completions: Completions, columns: Mapping[str, Sequence[Any]], **changed: Any) -> Completions:
    """The completions with other columns, named as by `kept_columns`, and other members `changed`."""
    sampled = Sampled(list(columns["ids"]), list(columns["log_probs"]), list(columns["ended"]))
    cut = columns.get("parts")
    parts = None if cut is None else Parts([texts for texts, _ in cut], [ids for _, ids in cut])
    return replace(completions, sampled=sampled, samples=list(columns["text"]), parts=parts, **changed)
