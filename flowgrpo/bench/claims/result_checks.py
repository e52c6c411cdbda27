"""What a result file must hold, so that a damaged file is named before anything is computed from it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

_HARDWARE = ("cpu", "cores", "threads", "gpu", "torch")
_NFE = ("old", "theta", "old_shared", "theta_shared")
# For each kind of run: axes, the score that must be known at every evaluation, and scores that may be unknown at some.
_EVALUATIONS = {
    "run": (("iteration", "updates", "compute", "seconds"), "paint", ("gold_dense", "proxy")),
    "race": (("compute", "seconds"), "gold", ()),
}
_PROBES = {
    "exploration": ("kernels",),
    "gradient_variance": ("squared", "mean_squared"),
    "gradient_spread": ("by_step",),
    "vanishing": ("shrunk", "value", "relative"),
}


def check_result(file: str, found: Any) -> None:
    """Refuse what is not the content of a result file of this name.

    Args:
        file: name of the file. It has the label, the key, and for most runs the seed.
        found: the value of its JSON.

    Raises:
        ValueError: something that reports read is missing or is not as they need it, or the name is of another result.
    """
    if not isinstance(found, dict):
        raise ValueError("it does not hold an object of JSON")
    hardware = _object(found, "hardware")
    for name in _HARDWARE:
        if name not in hardware:
            raise ValueError(f"hardware.{name} is missing")
    recipes = found.get("recipes")
    if not isinstance(recipes, list) or not recipes or not all(isinstance(text, str) for text in recipes):
        raise ValueError("recipes is missing or is not a list of texts")
    kind = _check_name(file, found)
    if "failed" in found and kind in (*_EVALUATIONS, "rise"):
        if not isinstance(found["failed"], str):
            raise ValueError("failed is not a text")
    elif kind in _EVALUATIONS:
        _check_run(found, kind)
    elif kind == "rise":
        _check_counts(found)
        for name in ("before", "after", "error"):
            _check_number(found.get(name), name)
    elif kind == "time":
        _check_timing(found)
    else:
        for name in _PROBES[found["label"]]:
            _check_leaves(found.get(name), name)


def _check_name(file: str, found: Mapping[str, Any]) -> str:
    """Refuse a result under the name of another one, such as a copy for another seed; returns the kind."""
    kind, label, seed = (found.get(name) for name in ("kind", "label", "seed"))
    if not isinstance(label, str):
        raise ValueError("label is missing or is not a text")
    begins = {"run": f"{label}-seed{seed}-", "race": f"race-{label}-", "rise": f"{label}-rise-"}
    begins |= {"time": f"time-{label}-", "probe": f"probe-{label}-"}
    if not isinstance(kind, str) or kind not in begins or (kind == "probe" and label not in _PROBES):
        raise ValueError("kind and label name no measurement")
    named = re.search(r"-seed(\d+)-[0-9a-f]+\.json$", file)
    if "seed" in found and named and str(seed) != named[1]:
        raise ValueError(f"it holds the result of seed {seed}")
    if not file.startswith(begins[kind]):
        raise ValueError(f"it holds a result whose name begins with {begins[kind]}")
    if "key" in found and not file.endswith(f"-{found['key']}.json"):
        raise ValueError(f"it holds the result with the key {found['key']}")
    return kind


def _check_run(found: Mapping[str, Any], kind: str) -> None:
    axes, score, others = _EVALUATIONS[kind]
    _check_counts(found)
    if kind == "run":
        _check_steps(found)
    for name, value in _object(found, "totals").items():
        _check_number(value, f"totals.{name}")
    marks = _object(found, "evaluation")
    for name in (*axes, score, *others):
        if name not in marks:
            raise ValueError(f"evaluation.{name} is missing")
    for name, values in marks.items():
        _check_numbers(values, f"evaluation.{name}", unknown=name not in (*axes, score))
    _check_lengths(marks, "evaluation")
    for name in axes:
        if len(marks[name]) < 2 or marks[name][0] < 0 or any(b <= a for a, b in pairwise(marks[name])):
            raise ValueError(f"evaluation.{name} does not rise over two or more evaluations")


def _check_counts(found: Mapping[str, Any]) -> None:
    for name, least in (("iterations", 1), ("images", 0)):
        value = found.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is missing or is not a whole number of {least} or more")


def _check_steps(found: Mapping[str, Any]) -> None:
    if not isinstance(found.get("trained_on"), str):
        raise ValueError("trained_on is missing or is not a text")
    steps = _object(found, "steps")
    for step in steps:
        if not step.isdecimal():
            raise ValueError(f"steps.{step} is not the number of a step")
        for name in ("mean", "var", "clipped"):
            _check_number(_object(steps, step, "steps.").get(name), f"steps.{step}.{name}")


def _check_timing(found: Mapping[str, Any]) -> None:
    seconds, evaluations = _object(found, "seconds"), _object(found, "nfe")
    if len(seconds) != len(found["recipes"]):
        raise ValueError(f"seconds has {len(seconds)} forms, and recipes has {len(found['recipes'])}")
    for name, values in seconds.items():
        _check_numbers(values, f"seconds.{name}")
        if not values or min(values) <= 0:
            raise ValueError(f"seconds.{name} does not have numbers above 0")
        for count in _NFE:
            _check_number(_object(evaluations, name, "nfe.").get(count), f"nfe.{name}.{count}")
    _check_lengths(seconds, "seconds")
    _check_numbers(found.get("iterations"), "iterations")
    passes, size = found.get("passes", 1), len(next(iter(seconds.values())))
    if not isinstance(passes, int) or passes < 1 or size % passes:
        raise ValueError("passes does not divide the number of seconds")


def _object(holder: Mapping[str, Any], name: str, place: str = "") -> dict[str, Any]:
    value = holder.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{place}{name} is missing or is not an object")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check_number(value: Any, place: str) -> None:
    if not _is_number(value):
        raise ValueError(f"{place} is missing or is not a finite number")


def _check_numbers(values: Any, place: str, unknown: bool = False) -> None:
    """Refuse what is no list of finite numbers; with `unknown`, null is no fault."""
    if not isinstance(values, list):
        raise ValueError(f"{place} is missing or is not a list")
    for k, value in enumerate(values):
        if not _is_number(value) and not (unknown and value is None):
            raise ValueError(f"{place} has no finite number at place {k + 1}")


def _check_lengths(lists: Mapping[str, Sequence[Any]], place: str) -> None:
    first = next(iter(lists))
    for name, values in lists.items():
        if len(values) != len(lists[first]):
            raise ValueError(f"{place}.{name} has {len(values)} values, and {place}.{first} has {len(lists[first])}")


def _check_leaves(value: Any, place: str) -> None:
    """Refuse what does not consist of finite numbers, or has an empty list or object in it."""
    if not isinstance(value, dict | list):
        return _check_number(value, place)
    inner = value if isinstance(value, dict) else {str(k + 1): one for k, one in enumerate(value)}
    if not inner:
        raise ValueError(f"{place} is empty")
    for name, one in inner.items():
        _check_leaves(one, f"{place}.{name}")
    lists = {name: one for name, one in inner.items() if isinstance(one, list) and _is_number(one[0])}
    if lists:
        _check_lengths(lists, place)
    return None
