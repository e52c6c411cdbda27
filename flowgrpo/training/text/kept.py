"""Completions with their scores as plain data, so that they can be remembered, and put back among others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...rewards.score_batches import RewardBatch, join_scores
from ...text.cutting import Parts
from ...text.sampling import Sampled

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from .text_policy import Completions

Packed = dict[str, Any]
"""Some completions as plain data, so that a checkpoint can hold them: name -> a value for each completion.

The names are `ids`, `log_probs`, `ended`, `text` and, if completions are cut, `parts`, the texts and the ids of the
parts. `scores` has what `RewardBatch` has for each sample."""
SCORES = ("sub_scores", "notes", "answers", "parts")


def packed(completions: Completions, scores: RewardBatch, rows: Sequence[int]) -> Packed:
    """What is remembered about some completions, and about their scores."""
    columns = {name: [column[row] for row in rows] for name, column in _columns(completions).items()}
    taken = scores.taken(rows)
    told = {name: getattr(taken, name) for name in SCORES}
    return {**columns, "scores": {"values": taken.values.tolist(), **told}}


def joined(
    completions: Completions,
    scores: RewardBatch,
    past: Sequence[Packed],
    rows: Sequence[int] | None = None,
    **changed: Any,
) -> tuple[Completions, RewardBatch]:
    """Completions and their scores, with remembered ones among them. These have taken no time.

    Args:
        completions: of now.
        scores: of the completions.
        past: what was remembered.
        rows: places among the completions of now and all remembered ones after them; everything in this order if left
            out.
        changed: members of the result that differ from the completions of now.
    """
    columns = {
        name: [*column, *(value for one in past for value in one[name])]
        for name, column in _columns(completions).items()
    }
    free = replace(scores, seconds=dict.fromkeys(scores.seconds, 0.0), rendered={})
    told = [{**one["scores"], "values": torch.tensor(one["scores"]["values"])} for one in past]
    all_scores = join_scores([scores, *(replace(free, **one) for one in told)])
    if rows is not None:
        columns = {name: [column[row] for row in rows] for name, column in columns.items()}
        all_scores = all_scores.taken(rows)
    if completions.teachers is not None and "teachers" not in changed:
        known = completions.teachers
        places = range(len(columns["ids"])) if rows is None else rows
        # A teacher that saw one completion must not teach another.
        changed["teachers"] = [known[row] if row < len(known) else None for row in places]
    sampled = Sampled(columns["ids"], columns["log_probs"], columns["ended"])
    cut = columns.get("parts")
    parts = None if cut is None else Parts([texts for texts, _ in cut], [ids for _, ids in cut])
    return replace(completions, sampled=sampled, samples=columns["text"], parts=parts, **changed), all_scores


def _columns(completions: Completions) -> dict[str, list[Any]]:
    """Everything that was written: name -> a value for each completion, as in `Packed`."""
    sampled, parts = completions.sampled, completions.parts
    found: dict[str, list[Any]] = {
        "ids": sampled.ids,
        "log_probs": sampled.log_probs,
        "ended": sampled.ended,
        "text": completions.samples,
    }
    return found if parts is None else found | {"parts": [list(pair) for pair in zip(parts.texts, parts.ids)]}
