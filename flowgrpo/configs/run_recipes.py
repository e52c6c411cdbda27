"""The recipes that a run has had, from its folder alone, and since when its evaluations have measured the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from .yaml_text import parse_yaml, read_text

NO_MEASURE = ("every", "quick", "results", "batch")
"""Settings of evaluations on which no score depends, but for rounding."""
ITERATION = re.compile(r"iter-(\d{1,8})")
"""The name of a folder of an iteration."""


def recipes_of(run: Path) -> Iterator[tuple[int, Path]]:
    """The recipes of a run that has changed, each with the iteration from which it holds, in this order."""
    files = ((ITERATION.fullmatch(file.parent.name), file) for file in (run / "recipes").glob("*/config.yaml"))
    yield from sorted((int(match[1]), file) for match, file in files if match)


def measure(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What scores depend on, among the settings of evaluations; what is not there is at its default."""
    return {key: value for key, value in {**_defaults(), **settings}.items() if key not in NO_MEASURE}


@cache
def _defaults() -> dict[str, Any]:
    """The settings of evaluations, of all tasks, with what holds where an earlier version did not write them."""
    # These import torch, and the command line is imported without it.
    from .image_recipe import EvaluateConfig
    from .masked_recipe import MaskedEvaluateConfig
    from .text_recipe import TextEvaluateConfig

    return {
        name: field.get_default(call_default_factory=True)
        for section in (EvaluateConfig, MaskedEvaluateConfig, TextEvaluateConfig)
        for name, field in section.model_fields.items()
    }


def measured_alike_since(run: Path, iteration: int | None = None) -> int:
    """The first iteration whose evaluation measures the same as the evaluation before another iteration.

    A run that goes on may have other evaluations, such as more steps. Their scores do not compare with earlier ones.

    Args:
        run: folder of a run.
        iteration: the other iteration; by default, the newest.
    """
    since, before = 0, None
    for start, file in recipes_of(run):
        if iteration is not None and start > iteration:
            break
        found = _measure(file)
        if before is not None and not _equal(before, found):
            since = start
        before = found
    return since


def _measure(file: Path) -> dict[str, Any]:
    """What the evaluations of a recipe measure; empty if it cannot be read, which `resume` reports."""
    recipe = None
    with suppress(OSError, ValueError):
        recipe = parse_yaml(read_text(file), str(file))
    settings = recipe.get("evaluate") if isinstance(recipe, dict) else None
    return measure(settings) if isinstance(settings, dict) else {}


def _equal(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two settings are equal. A key that only one of them has is of a version that knew it."""
    return all(before[key] == now[key] for key in before if key in now)
