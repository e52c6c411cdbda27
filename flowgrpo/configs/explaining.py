"""Sentences about the faults that pydantic finds in a recipe."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel

from ..parts.choice import fields_at, section_at
from .key_hints import hint
from .layers import part_hint
from .yaml_text import kind_of

__all__ = ["explain", "short"]


def explain(fault: Mapping[str, Any], schema: type[BaseModel]) -> str:
    """The sentence about a fault, after the key where it is: what is wrong, and what to write instead.

    Args:
        fault: an entry of pydantic's `ValidationError.errors()`.
        schema: schema of the recipe.
    """
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "part":
        return "\n".join(_explain_part(fault, schema, *inner) for inner in fault["ctx"]["faults"])
    given = fault.get("input")
    if fault["type"] == "extra_forbidden":
        known = fault["known"] if "known" in fault else fields_at(schema, fault["loc"][:-1])
        return f"  {place}: unknown key {str(fault['loc'][-1])!r}; {hint(fault['loc'], given, known, schema)}"
    if fault["type"] == "within":
        return f"  {place}.{fault['ctx']['within']} {fault['msg']}"
    if fault["type"] == "invalid_key":
        return f"  {place}: the key {given!r} is {kind_of(given)}, and keys are text; quote it if it is a name"
    message = WORDS.get(fault["type"], str(fault["msg"]).removeprefix("Value error, "))
    if fault["type"] == "too_short":
        message = f"is too short; write {fault['ctx']['min_length']} or more entries"
        return f"  {place}: {message}{_instead(fault, schema)}"
    if not place:
        return "\n".join(f"  {line}" for line in message.splitlines())
    return f"  {place}: {message}{_shown(fault['type'], given)}{_instead(fault, schema)}"


def _explain_part(
    fault: Mapping[str, Any], schema: type[BaseModel], place: tuple[Any, ...], said: Any, given: Any
) -> str:
    """The message about one fault within a part: its name, an unknown option, or the value of an option."""
    where = (*fault["loc"], *place)
    if isinstance(said, str):
        key = ".".join(str(part) for part in where)
        return f"  {key}: {said}" + ("" if given is None else f" (got {short(given)})")
    return explain({**said, "loc": where, "input": given}, schema)


WORDS = {
    "missing": "is missing",
    "string_type": "should be text",
    "dict_type": "should be a mapping of keys",
    "model_type": "should be a mapping of keys",
    "list_type": "should be a list",
    "finite_number": "should be a finite number",
    "int_parsing_size": "should be a smaller whole number",
}
"""Messages for some faults, by pydantic's names of the faults."""


OFF = {"evaluate": "write data.heldout=null to train without evaluations"}
"""How to do without a section that cannot be null."""

NEVER = {
    "evaluate.every": OFF["evaluate"],
    "evaluate.quick.every": "write evaluate.quick=null to leave these evaluations out",
    "run.sample_every": "write run.iterations or more to save samples of the first iteration alone",
    "run.checkpoint_every": "write run.iterations or more for none in between, except by run.checkpoint_minutes",
}
"""How to switch off what comes every so many iterations. Other tools take 0 or a number below it for this."""


def _instead(fault: Mapping[str, Any], schema: type[BaseModel]) -> str:
    """What to write in place of one value where something else belongs; empty for other faults."""
    given, place = fault.get("input"), ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "greater_than_equal" and place in NEVER:
        return f"; {NEVER[place]}"
    if fault["type"] == "too_short" and place == "evaluate.rewards":
        return f", or null for the rewards of the training; {OFF['evaluate']}"
    if fault["type"] == "missing" and fault["loc"] == ("rewards",):
        return "; write `rewards: [{name: …}]`, or `base: default` to begin with a recipe that has rewards"
    if fault["type"] == "model_type" and given is None:
        return f"; {OFF[place]}" if place in OFF else "; it cannot be null, so leave it out"
    if fault["type"] == "model_type" and not isinstance(given, dict | list):
        try:
            keys = ", ".join(fields_at(schema, fault["loc"]))
        except KeyError:
            return ""
        part = part_hint(given) if isinstance(given, str) else ""
        return f"; its keys are {keys}, so write {place}.KEY={short(given)}" + (f". {part}" if part else "")
    if fault["type"] == "list_type" and isinstance(given, dict) and given:
        return f"; write {place}=[{{{next(iter(given))}: …}}], a list with this mapping as its entry"
    if fault["type"] == "list_type" and isinstance(given, str):
        try:
            entry = section_at(schema, fault["loc"][:-1]).model_fields[fault["loc"][-1]].annotation
        except KeyError:
            return ""
        texts = str in (found := get_args(entry)) or any(str in get_args(inner) for inner in found)
        fields = [name for kind in get_args(entry) for name in getattr(kind, "model_fields", ())]
        # Where an entry has a path, its name is only what a recipe calls it.
        key = "path" if "path" in fields else "name"
        return f"; write {place}=[{given}]" if texts else f"; write {place}=[{{{key}: {given}}}]"
    return ""


def _shown(kind: str, given: Any) -> str:
    """The given value, and why YAML read it in this way."""
    if kind == "missing" or isinstance(given, dict | list):
        return "" if kind == "missing" else f" (got {kind_of(given)})"
    if given is None:
        return " (got null)"
    if isinstance(given, bool):
        return f" (got {str(given).lower()}, as which YAML reads the words {YES if given else NO}; quote a word)"
    if isinstance(given, datetime.date):
        return f" (got {given}, which YAML reads as a date; quote it to make it text)"
    return f" (got {short(given)})"


YES, NO = "yes, on and true", "no, off and false"


def short(value: Any, most: int = 80) -> str:
    """A value as text; the middle of a long text is left out."""
    # Python refuses to write whole numbers with thousands of digits.
    text = (
        repr(value) if not isinstance(value, int) or value.bit_length() < 10_000 else "a number of thousands of digits"
    )
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 4 :]}"
