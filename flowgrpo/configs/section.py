"""What every section of a recipe is built on."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MOST, MOST_OF_A_KIND = 2**63 - 1, 10**9
"""The greatest whole number, which a seed may be, and the greatest count."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused and values are not silently converted between types.

    Numbers are finite, and whole numbers not beyond what the libraries count with.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_counted(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            kind = cls.model_fields[str(info.field_name)].annotation
            counts = kind in (int, int | None) and info.field_name != "seed"
            most = MOST_OF_A_KIND if counts else MOST
            if abs(value) > most:
                raise PydanticCustomError("too_great", f"should be less than or equal to {most}")
        elif isinstance(value, dict | list) and (within := _nan_within(value)):
            raise PydanticCustomError("nan_within", "is nan; give a finite number", {"within": within})
        return value


def _nan_within(value: Any) -> str | None:
    """Where in a free mapping or list there is no number; None if nowhere."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, float) and math.isnan(inner):
            return str(key)
        if isinstance(inner, dict | list) and (within := _nan_within(inner)):
            return f"{key}.{within}"
    return None


OptionNumber = Annotated[float, Field(allow_inf_nan=True)]
"""A hyper-parameter: without limit where it is infinite."""
