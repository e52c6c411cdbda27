"""Reading of scores from the answers of judges. A missing score is never treated as a low score."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..scores import InvalidScores
from ..text.json_output import read_json
from ..worker import GaveUp, Worker
from .judge_client import JudgeReply
from .judge_patterns import last_match

LONGEST_ANSWER = 100_000
NOTE_CHARACTERS = 1000
PATTERN_SECONDS = 2.0
FEWEST_FOR_A_VERDICT = 8
# The beginning of a longer number never matches: the 1 of 1e999 or of 1,000 is not the score that was given.
NUMBER = r"[-+]?(?:\d{1,9}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,9})?(?![\d.]*\d|[eE][-+]?\d|,\d)"
_THOUGHT = "</think>"


class Unreadable(ValueError):
    """An answer has no score; the message says why."""


class ScoreReader:
    """Reads one number from an answer and scales it to [0, 1].

    Args:
        reward: name of the reward, for messages.
        pattern: a regular expression with one group around the number; the last match counts. `.` matches line ends
            too, and case does not count. The pattern runs in a separate process, for at most 2 seconds.
        field: in place of a pattern, the name of a field of the JSON object in the answer, with dots between levels.
        scale: lowest and highest score, which become 0 and 1; None keeps any number unchanged.
        slack: how far outside the scale a score may be. Such a score counts as the end of the scale.
        ours: the pattern is from this package. It takes linear time, so it does not need a separate process.

    Raises:
        ValueError: an option is wrong.
    """

    def __init__(
        self,
        reward: str,
        pattern: str | None,
        field: str | None = None,
        scale: Sequence[float] | None = None,
        slack: float = 0.0,
        *,
        ours: bool = False,
    ) -> None:
        if (pattern is None) == (field is None):
            raise ValueError(f"{reward}: give `pattern`, a regular expression, or `field`, a name in the answer's JSON")
        if pattern is not None:
            check_pattern(reward, "pattern", pattern, 1)
        if field is not None and (not isinstance(field, str) or not field):
            raise ValueError(f"{reward}: field is {field!r}; give the name of a field, such as score")
        self.pattern, self.field, self.slack, self.ours = pattern, field, slack, ours
        self.scale = check_scale(reward, scale)
        self._worker = Worker(f"{__package__}.judge_patterns:last_match")

    def read(self, answer: JudgeReply) -> float:
        """Return the score of an answer.

        Raises:
            Unreadable: the answer has no score.
        """
        text = readable(answer)
        value = self._field(text) if self.pattern is None else self._match(text)
        if self.scale is None:
            return value
        low, high = self.scale
        if not low - self.slack <= value <= high + self.slack:
            raise Unreadable(f"the score {value:g} is not within {low:g} to {high:g}")
        return (min(max(value, low), high) - low) / (high - low)

    def close(self) -> None:
        """End the process that matches the pattern."""
        self._worker.close()

    def _match(self, text: str) -> float:
        try:
            if self.ours:
                found = last_match(str(self.pattern), text)
            else:
                found = self._worker(self.pattern, text, seconds=PATTERN_SECONDS)
        except GaveUp as error:
            raise Unreadable(f"the pattern was given up: {error}") from None
        return as_score(found)

    def _field(self, text: str) -> float:
        value = read_object(text)
        for name in str(self.field).split("."):
            if not isinstance(value, Mapping) or name not in value:
                raise Unreadable(f"the JSON of the answer has no field {self.field}")
            value = value[name]
        return as_score(value)


def readable(answer: JudgeReply) -> str:
    """Return the text of an answer, without the reasoning before it.

    Raises:
        Unreadable: the server gave no answer, or the answer was cut off. The end of such an answer may be half a
            number.
    """
    if answer.refused:
        raise Unreadable(f"no answer: {answer.refused}")
    if answer.cut:
        raise Unreadable("the answer was cut off at max_tokens; raise max_tokens")
    if len(answer.text) > LONGEST_ANSWER:
        raise Unreadable(f"the answer is too long: it has {len(answer.text)} characters")
    text = answer.text.rpartition(_THOUGHT)[2].strip()
    if not text or text.startswith("<think>"):
        raise Unreadable("the answer is empty")
    return text


def tagged(text: str, tag: str) -> str | None:
    """Return the content of the last <tag> that is closed; None if there is none."""
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, inside = before.rpartition(f"<{tag}>")
    return inside if opening and closing else None


def read_object(text: str) -> Any:
    """Return the JSON value in an answer: the whole answer, its last fenced block, or the value at its first bracket.

    Raises:
        Unreadable: there is no JSON value.
    """
    try:
        return read_json(text)[0]
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"no JSON: {error}") from None


def list_in(value: Any) -> list[Any] | None:
    """Return the list in the JSON of an answer; None if it is no list."""
    if isinstance(value, Mapping) and len(value) == 1:
        # Servers that force JSON output allow only an object, and then models put the list into an object.
        value = next(iter(value.values()))
    return value if isinstance(value, list) else None


def read_fields(answer: JudgeReply) -> Mapping[str, Any]:
    """Return the JSON object in an answer; an empty one if the JSON is no object.

    Raises:
        Unreadable: there is no JSON value, or the answer cannot be read.
    """
    value = read_object(readable(answer))
    return value if isinstance(value, Mapping) else {}


def as_score(value: Any) -> float:
    """Return a number, or a text that contains a number, as a float.

    Raises:
        Unreadable: the value is neither of the two, or is not finite.
    """
    if value is None:
        raise Unreadable("no score in the answer")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise Unreadable(f"{str(value)[:40]!r} is not a score")
    return number


def check_scale(reward: str, scale: Any) -> tuple[float, float] | None:
    """Return the lowest and the highest score as floats.

    Raises:
        ValueError: the scale is not two finite numbers in increasing order.
    """
    if scale is None:
        return None
    numbers = list(scale) if isinstance(scale, (list, tuple)) else []
    fits = len(numbers) == 2 and all(
        isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
        for number in numbers
    )
    if not fits or not numbers[0] < numbers[1]:
        raise ValueError(
            f"{reward}: scale is {scale!r}; give the lowest and the highest score, such as [1, 5], or null"
        )
    return float(numbers[0]), float(numbers[1])


def check_pattern(reward: str, name: str, pattern: Any, groups: int) -> None:
    """Refuse anything that is not a regular expression with the given number of groups.

    Raises:
        ValueError: the pattern is not a regular expression, or has another number of groups.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{reward}: {name} {pattern!r} is not a regular expression: {error}") from None
    if compiled.groups != groups:
        raise ValueError(f"{reward}: {name} {pattern!r} has {compiled.groups} groups (...), but must have {groups}")


def note_of(*answers: JudgeReply, problem: str = "") -> str:
    """Return the note about the answers on a sample: their texts, and before them the reason if they have no score."""
    text = " / ".join(answer.text.strip() for answer in answers)
    shown = text if len(text) <= NOTE_CHARACTERS else f"{text[:NOTE_CHARACTERS]} …"
    return f"no score ({problem}): {shown}" if problem else shown


def refuse_if_none(reward: str, values: Sequence[float], notes: Sequence[str]) -> None:
    """Stop a run if the judge answers but never gives a score, because its prompt or pattern does not fit the model.

    Raises:
        InvalidScores: there are at least 8 values, and none of them is a number.
    """
    if len(values) >= FEWEST_FOR_A_VERDICT and all(math.isnan(value) for value in values):
        raise InvalidScores(
            f"{reward}: none of {len(values)} answers has a score; check whether prompt, pattern and max_tokens fit "
            f"the model. The first answer: {notes[0]:.300}"
        )
