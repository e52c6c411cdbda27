"""Settings that all published models of a kind have. Their code has further choices, which the classes here lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def other_settings(config: Any, expected: Mapping[str, Any], model: str) -> list[str]:
    """A message for each setting of a configuration that no published model has; null is the published setting.

    Args:
        config: of the model.
        expected: setting -> its value in published models.
        model: name of the kind of models.
    """
    found = []
    for key, value in expected.items():
        given = getattr(config, key, value)
        if given is not None and given != value:
            found.append(f"{key} is {given!r}, and {model} is known with {value!r} only")
    return found
