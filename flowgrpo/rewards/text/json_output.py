"""Structured output: a completion that is one JSON value, fits a schema and has the expected content.

The four graded parts follow RL-Struct (arXiv 2512.00319): structure, format, validity and content.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..base import require
from ..options import check_seconds, check_weights, weighted
from ..scores import Scores
from ..worker import GaveUp, Worker
from .extraction import fenced
from .text_format import LONGEST_TEXT

PARTS = ("structure", "format", "schema", "content")
DEEPEST = 100
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_OPENING = re.compile(r"[\[{]")


class JsonOutput:
    """A JSON value and nothing else, which fits a schema and has the expected fields: weighted mean of four parts.

    The JSON value is the whole completion if it parses. Otherwise it is the last fenced block. If the block does not
    parse either, it is the value that begins at the first bracket or brace. Each part is in [0, 1]; without a value all
    parts are 0:

        structure   1 if there is a value that parses
        format      1 if the completion is the value and nothing else, without prose and without a fence
        schema      share of the schema's requirements that are satisfied; 1 if and only if the value is valid. Every
                    property that is required or present counts with its own share, `items` counts with the mean over
                    the items, and all other keywords count once, together. Needs the option or the column `schema`
        content     share of the fields of the column `expected` that are equal; objects are compared field by field.
                    A field that was not expected does not count. 1 and 1.0 are equal; true and 1 are not equal

    A completion of more than 100,000 characters, or with more than 100 levels of nesting, has no value. `NaN` and
    `Infinity` are not JSON. A number that is too large for a float, such as `1e999`, is not accepted either. A schema
    is checked in a separate process. If this takes longer than `seconds`, it is given up, and the part is 0.

    Args:
        schema: a JSON schema, for samples whose column `schema` is empty. Schemas need the package jsonschema.
        weights: part -> weight in the mean, 0 or more; parts that are not named have the weight 1.
        seconds: how long the check of the schema may take for one completion.

    Raises:
        ValueError: an option is wrong.
        ModuleNotFoundError: `schema` is given and jsonschema is not installed.
    """

    name = "json_output"

    def __init__(
        self,
        schema: Mapping[str, Any] | str | None = None,
        weights: Mapping[str, float] | None = None,
        seconds: float = 5.0,
    ) -> None:
        check_seconds(self.name, seconds)
        self.weights = check_weights(self.name, weights, dict.fromkeys(PARTS, 1.0))
        self.seconds = seconds
        self._worker = Worker(f"{__package__}.json_schema:share")
        self.schema = None if schema is None else _read(schema, "the option `schema`")
        if schema is not None:
            require("jsonschema")
            self._schema(self.schema, None, "the option `schema`")

    def __call__(
        self,
        completions: Sequence[str],
        prompts: Sequence[str],
        schema: Sequence[Any] | None = None,
        expected: Sequence[Any] | None = None,
    ) -> Scores:
        """Score the JSON in completions.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            schema: B schemas, as objects or as JSON text; None uses the schema of the option.
            expected: B values; a text is read as JSON. None if nothing is expected.

        Returns:
            Scores with B values in [0, 1]: the weighted mean of the parts that apply. Sub-scores are the parts, NaN for
            a part that does not apply. Notes say what is wrong. `answers` are the JSON values; equal values have equal
            texts.

        Raises:
            ValueError: a schema is not a JSON schema, or a text in a column is not JSON.
            ModuleNotFoundError: there is a schema and jsonschema is not installed.
        """
        nothing = [None] * len(completions)
        rows: list[dict[str, float]] = []
        notes, answers = [], []
        for text, own, wanted in zip(completions, schema or nothing, expected or nothing, strict=True):
            parts, note, answer = self._parts(text, own, wanted)
            rows.append(parts)
            notes.append(note)
            answers.append(answer)
        values = [weighted(self.weights, parts) for parts in rows]
        return Scores(values, {part: [row[part] for row in rows] for part in PARTS}, notes, answers=answers)

    def close(self) -> None:
        """End the process that checks schemas."""
        self._worker.close()

    def _parts(self, text: str, own: Any, wanted: Any) -> tuple[dict[str, float], str, str | None]:
        schema = self.schema if own is None else _read(own, "the column `schema`")
        target = None if wanted is None else _read(wanted, "the column `expected`")
        parts = {
            "structure": 0.0,
            "format": 0.0,
            "schema": math.nan if schema is None else 0.0,
            "content": math.nan if wanted is None else 0.0,
        }
        try:
            value, alone = read_json(text)
        except ValueError as error:
            return parts, f"no JSON: {error}", None
        parts.update(structure=1.0, format=float(alone))
        notes = [] if alone else ["text beside the JSON value"]
        if schema is not None:
            try:
                parts["schema"] = self._schema(schema, value, "the schema")
            except GaveUp as error:
                notes.append(f"the schema was given up: {error}")
        if wanted is not None:
            parts["content"] = _content(target, value)
        return parts, "; ".join(notes), json.dumps(_settled(value), sort_keys=True)

    def _schema(self, schema: Any, value: Any, where: str) -> float:
        try:
            return float(self._worker(schema, value, seconds=self.seconds))
        except ValueError as error:
            raise ValueError(f"json_output: {where} is not a JSON schema: {error}") from None


def read_json(text: str) -> tuple[Any, bool]:
    """Return the JSON value of a completion, and whether it is the whole completion; see `JsonOutput`.

    Raises:
        ValueError: there is no JSON value, or the text is too long or nested too deeply; the message says which.
    """
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{len(text)} characters are too long")
    try:
        return _parse(text.strip(), False), True
    except ValueError as error:
        problem = error
    block, opening = fenced(text), _OPENING.search(text)
    for part, open_ended in ((block, False), (text[opening.start() :] if opening else "", True)):
        if part.strip():
            with suppress(ValueError):
                return _parse(part.strip(), open_ended), False
    raise problem


def _read(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return _parse(value, False)
    except ValueError as error:
        raise ValueError(f"json_output: {where} has {value!r:.80}, which is not JSON: {error}") from None


def _parse(text: str, open_ended: bool) -> Any:
    depth = deepest = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if bracket.group() in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise ValueError(f"it is nested {deepest} deep, more than {DEEPEST}")
    decoder = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
    return decoder.raw_decode(text)[0] if open_ended else decoder.decode(text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    """Return a number; refuse a number such as 1e999, which Python would read as infinity."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:40]} is too large a number")
    return number


def _content(expected: Any, value: Any) -> float:
    """Return the share of the expected fields that are equal; only objects are compared field by field."""
    if not isinstance(expected, dict) or not expected:
        return float(_same(expected, value))
    members = value if isinstance(value, dict) else {}
    shares = [_content(inner, members[name]) if name in members else 0.0 for name, inner in expected.items()]
    return math.fsum(shares) / len(shares)


def _settled(value: Any) -> Any:
    """Return a value in a form that is the same for all values that `_same` finds equal: 1.0 becomes 1."""
    if isinstance(value, dict):
        return {name: _settled(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_settled(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    # In Python True equals 1, but in JSON true does not equal 1.
    return isinstance(one, bool) == isinstance(other, bool) and one == other
