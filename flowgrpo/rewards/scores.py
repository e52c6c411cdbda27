"""What a reward may return, and the check that it did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


class InvalidScores(ValueError):
    """A reward returned something that is not one number a sample.

    Attributes:
        index: the row at fault within the call, or None if the whole return value is.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True)
class Scores:
    """What a reward may return when it has more to say than one number a sample.

    Attributes:
        values: [B] floats (list, array or tensor); None and NaN mean "not applicable". After `normalise`
            a float32 tensor on the CPU.
        sub_scores: name -> [B] floats, shown beside the score and never optimised.
        notes: [B] strings, a written rationale for each sample; or empty.
        answers: [B] strings, what the reward read in each sample, written so that samples which mean the same to it
            have the same text (`1/2` for 0.5 too); None where it read nothing. Or empty.
    """

    values: Any
    sub_scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    answers: Sequence[str | None] = ()


def normalise(result: Any, count: int, name: str) -> Scores:
    """Check a reward's return value and turn it into `Scores` of plain types.

    Raises:
        InvalidScores: names the reward, what it returned and what it should return.
    """
    scores = result if isinstance(result, Scores) else Scores(result)
    values = _floats(scores.values, count, f"reward {name!r}")
    subs = {
        key: _floats(column, count, f"sub-score {key!r} of reward {name!r}").tolist()
        for key, column in scores.sub_scores.items()
    }
    notes = ["" if note is None else str(note) for note in scores.notes]
    if notes and (isinstance(scores.notes, str) or len(notes) != count):
        raise InvalidScores(f"reward {name!r} returned {len(notes)} notes for {count} samples; one string each")
    return Scores(values, subs, notes, answers=_answers(scores.answers, count, name))


def _answers(given: Any, count: int, name: str) -> list[str | None]:
    if not isinstance(given, (list, tuple)) or len(given) not in (0, count):
        what = (
            f"{len(given)} answers" if isinstance(given, (list, tuple)) else f"answers of type {type(given).__name__}"
        )
        raise InvalidScores(f"reward {name!r} returned {what} for {count} samples; a list of one text or None each")
    for row, answer in enumerate(given):
        if not isinstance(answer, (str, type(None))):
            raise InvalidScores(
                f"reward {name!r} returned the answer {answer!r:.80} ({type(answer).__name__}) in row {row} of the "
                "call; write it as a text, or None where nothing was read",
                row,
            )
    return list(given)


def _floats(result: Any, count: int, what: str) -> Tensor:
    if isinstance(result, (Tensor, np.ndarray)):
        if result.ndim != 1:
            raise InvalidScores(f"{what} returned shape {list(result.shape)} for {count} samples; return [{count}]")
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise InvalidScores(
            f"{what} returned a {type(result).__name__} ({result!r:.80}) for {count} samples; return a list, "
            "array or tensor of one float each, or Scores(values, sub_scores, notes)"
        )
    if len(result) != count:
        raise InvalidScores(f"{what} returned {len(result)} values for {count} samples; return one for each")
    values = torch.tensor([_number(value, row, what) for row, value in enumerate(result)], dtype=torch.float32)
    infinite = values.isinf().nonzero().flatten().tolist()
    if infinite:
        row = infinite[0]
        raise InvalidScores(
            f"{what} returned {result[row]!r} in row {row} of the call, infinite in float32; "
            "return a finite number, or NaN if it does not apply",
            row,
        )
    return values


def _number(value: Any, row: int, what: str) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, (str, bytes, complex)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError, RuntimeError):
            pass
    raise InvalidScores(
        f"{what} returned {value!r:.80} ({type(value).__name__}) in row {row} of the call; return a float, "
        "or NaN or None if it does not apply",
        row,
    )
