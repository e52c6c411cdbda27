"""Metrics that a part of a recipe adds to the metrics of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def own_metrics(who: str, found: Any, record: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics that a part of a recipe adds to an iteration's; numbers that are not finite become None.

    Args:
        who: the part, for messages.
        found: what its method `record` returned.
        record: the metrics so far.

    Raises:
        ValueError: it is no mapping of names to numbers, or a name is taken.
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"record() of {who} has to give a mapping of names to numbers; it gave {type(found).__name__}")
    metrics: dict[str, float | None] = {}
    for name, value in found.items():
        if name in record:
            raise ValueError(f"record() of {who} gives {name!r}, which the run records itself; use another name")
        try:
            given = math.nan if value is None else float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"record() of {who} gives {name!r} as {type(value).__name__}; give one number for a name"
            ) from None
        metrics[name] = given if math.isfinite(given) else None
    return metrics
