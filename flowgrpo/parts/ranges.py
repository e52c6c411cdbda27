"""Types that say which values an option takes. A plain number takes any finite value."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

T = TypeVar("T")


class _Given:
    """Marks a parameter whose value comes from the run, not from the recipe."""


Positive = Annotated[float, Field(gt=0)]
Spread = Annotated[float, Field(gt=0, le=1000)]
"""Weight of a sibling's own noise; the shared noise has weight 1, at most 1,000 times less."""
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
"""From 0 to 1, both included."""
Bound = Annotated[float, Field(ge=0, allow_inf_nan=True)]
"""Not below 0; `.inf` means that there is no bound."""
Unbounded = Annotated[float, Field(allow_inf_nan=True)]
Fraction = Annotated[float, Field(gt=0, le=1)]
"""Above 0, and at most 1."""
Inside = Annotated[float, Field(gt=0, lt=1)]
"""Above 0 and below 1."""
Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]
AtLeastOne = Annotated[float, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Words = Annotated[str, Field(min_length=1)]
"""A text that is not empty."""

Given = Annotated[T, _Given]
"""`elements: Given[int]` is not an option. The run gives its value to every part that asks for it by this name."""


def is_given(annotation: object) -> bool:
    """Whether a parameter of this annotation is given by the run."""
    return _Given in getattr(annotation, "__metadata__", ())
