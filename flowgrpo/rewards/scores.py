"""What a reward may return, and the check of what it returned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


class InvalidScores(ValueError):
    """A reward returned something else than one number for each sample.

    Attributes:
        index: the row of the call that is wrong, or None if the whole return value is wrong.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True)
class Scores:
    """What a reward may return if it gives more than one number for each sample.

    Attributes:
        values: [B] floats (list, array or tensor). None and NaN mean "not applicable". After `normalise`,
            a float32 tensor on the CPU.
        sub_scores: name -> [B] floats, shown beside the score and never optimised.
        notes: [B] strings, a written reason for each score; or empty.
        answers: [B] strings, what the reward read in each sample; or empty. Answers with the same meaning have the same
            text (`1/2` also for 0.5). None if the reward read nothing.
        parts: [B] lists with a float for each part of a completion, in order; or empty. None or NaN for a part to which
            the reward does not apply; None in place of the list if it applies to no part of the completion.
        rendered: name -> [B] lists of the images that the reward made of a completion: [3, H, W] or videos
            [F, 3, H, W], floats in [0, 1] or uint8. None where it made none; an empty list if it has made images and
            does not hand them out. The name is empty, or says what else the images are of. A gallery shows the images
            beside the completion.
    """

    values: Any
    sub_scores: Mapping[str, Sequence[float]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    answers: Sequence[str | None] = ()
    parts: Sequence[Sequence[float | None] | None] = ()
    rendered: Mapping[str, Sequence[Sequence[Tensor] | None]] = field(default_factory=dict)


def normalise(result: Any, count: int, name: str, cut: Sequence[Sequence[str]] | None = None) -> Scores:
    """Check a reward's return value, and turn it into `Scores` of plain types.

    Args:
        result: the return value.
        count: B, the number of samples.
        name: name of the reward.
        cut: B lists of the parts that the reward was given, if any. The reward must score each part.

    Raises:
        InvalidScores: the message names the reward, what it returned and what it should return.
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
    parts = _parts(scores.parts, count, name, cut)
    answers, rendered = _answers(scores.answers, count, name), _rendered(scores.rendered, count, name)
    return Scores(values, subs, notes, answers=answers, parts=parts, rendered=rendered)


def _parts(given: Any, count: int, name: str, cut: Sequence[Sequence[str]] | None) -> list[list[float] | None]:
    rows = given.tolist() if isinstance(given, (Tensor, np.ndarray)) else given
    if not isinstance(rows, (list, tuple)) or len(rows) not in (0, count):
        what = f"{len(rows)} entries" if isinstance(rows, (list, tuple)) else f"a {type(rows).__name__}"
        raise InvalidScores(
            f"reward {name!r} returned {what} as `parts` of {count} samples; a list of floats, or None, for each"
        )
    sizes = [None if cut is None else len(texts) for texts in cut or rows]
    return [None if own is None else _of_parts(own, row, name, sizes[row]) for row, own in enumerate(rows)]


def _of_parts(scores: Any, row: int, name: str, size: int | None) -> list[float]:
    """Scores of the parts of one sample, in float32. `size` is their number, if it is known."""
    plain = scores.tolist() if isinstance(scores, (Tensor, np.ndarray)) else scores
    if not isinstance(plain, (list, tuple)):
        raise InvalidScores(
            f"reward {name!r} returned {plain!r:.80} ({type(plain).__name__}) as `parts` of row {row} of the call; a "
            "list of floats, or None",
            row,
        )
    if size is not None and len(plain) != size:
        raise InvalidScores(
            f"reward {name!r} returned {len(plain)} scores for the {size} parts of row {row} of the call; one for each",
            row,
        )
    numbers = torch.tensor([_number(v, row, f"reward {name!r}, of a part,") for v in plain], dtype=torch.float32)
    if bool(numbers.isinf().any()):
        raise InvalidScores(
            f"reward {name!r} returned an infinite score of a part in row {row} of the call; return a finite number, "
            "or NaN if it does not apply",
            row,
        )
    found: list[float] = numbers.tolist()
    return found


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


def _rendered(given: Any, count: int, name: str) -> dict[str, list[list[Tensor] | None]]:
    if not isinstance(given, Mapping) or not all(isinstance(rows, (list, tuple)) for rows in given.values()):
        raise InvalidScores(f"reward {name!r} returned no mapping of lists as `rendered`; give name -> {count} lists")
    for rows in given.values():
        if len(rows) != count:
            raise InvalidScores(f"reward {name!r} returned {len(rows)} lists of images for {count} samples; one each")
        for row, images in enumerate(rows):
            if images is not None and not (isinstance(images, (list, tuple)) and all(map(_is_image, images))):
                raise InvalidScores(
                    f"reward {name!r} returned {images!r:.80} as images of row {row} of the call; give a list of "
                    "tensors [3, H, W] or [F, 3, H, W], floats in [0, 1] or uint8, or None",
                    row,
                )
    return {key: [None if images is None else list(images) for images in rows] for key, rows in given.items()}


def _is_image(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.dtype == torch.uint8)
        and value.ndim in (3, 4)
        and value.shape[-3] == 3
        and value.numel() > 0
    )


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
    if isinstance(result, tuple) and result and np.ndim(result[0]) and (len(result) != count or _has_columns(result)):
        kinds = ", ".join(type(one).__name__ for one in result)
        raise InvalidScores(
            f"{what} returned a tuple ({kinds:.80}) for {count} samples; return the scores alone, or Scores(values, "
            "sub_scores, notes)"
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


def _has_columns(result: Sequence[Any]) -> bool:
    """Whether a reward returned the scores with something beside them, as `(scores, {})`."""
    return any(isinstance(one, Mapping) for one in result)


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
