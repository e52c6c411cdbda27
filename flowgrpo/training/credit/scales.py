"""Options that all comparisons have in common: what differences are divided by."""

from __future__ import annotations

from typing import Literal

Scale = Literal["group", "batch", "none"]
"""The standard deviation of the group, of the batch, or nothing."""

ScaleWithin = Literal["group", "none"]

Ddof = Literal[0, 1]
"""1 for the sample standard deviation, 0 for the population one."""
